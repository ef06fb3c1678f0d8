"""Rotary embeddings as configs describe them: frequencies and magnitude are transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.layers.rotary import rotary_frequencies
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.rope_json import flat_rotary
from lamella.model_executor.models.typed_fields import TypedFields

MAX_POSITIONS, HEAD_DIM = 4096, 64
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e4},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 20, "beta_slow": 3},
    {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [4.0] * 32,
     "original_max_position_embeddings": 256},
    {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [4.0] * 32, "factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
]  # fmt: skip


def ours(**fields: Any):
    return flat_rotary(ConfigJson(TypedFields(fields, "config.json")), HEAD_DIM, max_positions=MAX_POSITIONS)


@pytest.mark.parametrize("outer", [{}, {"rope_theta": 777.0}, {"original_max_position_embeddings": 128}], ids=str)
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_frequencies(rope: dict[str, Any], outer: dict[str, Any]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(rope), **outer
    )
    kind = config.rope_parameters["rope_type"]
    found = ours(rope_parameters=rope, **outer)
    if kind == "default":
        expected = config.rope_parameters["rope_theta"] ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        magnitude = 1.0
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config)
    torch.testing.assert_close(rotary_frequencies(found, torch.device("cpu")), expected.float(), rtol=2e-6, atol=0)
    assert found.magnitude == pytest.approx(magnitude)
    if kind == "longrope":
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=MAX_POSITIONS + 1)
        long = rotary_frequencies(found, torch.device("cpu"), is_long=True)
        torch.testing.assert_close(long, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "axial"}, "rope type 'axial' is not built; known: default, linear"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"factor": 2.0}, "without rope_type it scales nothing"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "transformers reads rope_type"),
        ({"rope_type": "default", "mrope_section": [1]}, "mrope_section is not known"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "must be 1"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}, "must differ"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0]}, "32 numbers"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 32, "long_factor": [1.0] * 32}, "32 numbers above"),
    ],
    ids=str,
)
def test_what_is_refused(rope: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        ours(rope_parameters=rope)


def test_the_old_key_wins_whole() -> None:
    found = ours(
        rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default", "rope_theta": 5.0}
    )
    assert (found.theta, found.position_divisor) == (10_000.0, 2.0)
