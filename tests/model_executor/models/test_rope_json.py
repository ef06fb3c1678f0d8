"""Rotary embeddings as configs describe them: frequencies and magnitude are transformers'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lamella.errors import ModelLoadError, UnbuiltVariantError
from lamella.model_executor.layers.rotary import rotary_frequencies
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.rope_json import flat_rotary
from lamella.model_executor.models.typed_fields import TypedFields
from tests.helpers.parsed_configs import parsed

MAX_POSITIONS, HEAD_DIM = 4096, 64
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e4},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"factor": 3.0},
    {"rope_type": "default", "type": "linear", "factor": 3.0},
    {"rope_type": "linear", "type": "yarn", "factor": 3.0},
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
        ({"factor": -2.0}, "factor=-2.0: must be"),
        (
            {"rope_type": "default", "mrope_section": [1]},
            r"mrope_section=\[1\]: it is not known; a rotary",
        ),
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


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"factor": 3.0}, "rope_parameters.factor=3.0 scales nothing without a rope_type"),
        ({"rope_type": "linear", "type": "yarn", "factor": 3.0}, "rope_parameters.type='yarn' is left out"),
        ({"rope_type": "linear", "type": "linear", "factor": 3.0}, None),
        ({"rope_type": "default", "factor": 1.0}, None),
    ],
    ids=str,
)
def test_what_transformers_passes_over_is_said(rope: dict[str, Any], told: str | None, caplog: Any) -> None:
    ours(rope_parameters=rope)
    assert told in caplog.text if told else not caplog.records


@pytest.mark.parametrize("rope", [{"rope_type": "axial"}, {"rope_type": "default", "mrope_section": [1]}], ids=str)
def test_what_other_code_may_know_is_a_variant(rope: dict[str, Any]) -> None:
    with pytest.raises(UnbuiltVariantError):
        ours(rope_parameters=rope)


FULL, SLIDING = "full_attention", "sliding_attention"
OF_KINDS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 555.0, "rope_local_base_freq": 777.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0, "rope_theta": 99.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 256}},
    {"rope_parameters": {FULL: {"rope_theta": 99.0}}},
    {"rope_parameters": {FULL: {"type": "linear", "factor": 3.0}, SLIDING: {"rope_type": "linear", "factor": 2.0}}},
    {"rope_parameters": {FULL: {"factor": 3.0}, SLIDING: None}, "rope_theta": 555.0},
    {"rope_parameters": {FULL: {"rope_theta": 5.0}}, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {FULL: {"rope_type": "default"}}, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {SLIDING: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}},
]  # fmt: skip


@pytest.mark.parametrize("architecture", ["Gemma3", "Olmo3"])
@pytest.mark.parametrize("fields", OF_KINDS, ids=str)
def test_objects_of_each_kind_of_layer_and_older_keys(architecture: str, fields: dict[str, Any]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    class_name = {"Gemma3": "Gemma3TextConfig", "Olmo3": "Olmo3Config"}[architecture]
    sizes = {"head_dim": HEAD_DIM, "hidden_size": 512, "num_attention_heads": 8}
    theirs = getattr(transformers, class_name)(**sizes, **copy.deepcopy(fields))
    for layer in parsed(architecture, **sizes, **fields).layers:
        kind, found = layer.attention.kind, layer.attention.rotary
        assert found is not None
        parameters = theirs.rope_parameters[kind]
        expected, magnitude = parameters["rope_theta"] ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
        if parameters["rope_type"] != "default":
            expected, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, layer_type=kind)
        torch.testing.assert_close(rotary_frequencies(found, torch.device("cpu")), expected.float(), rtol=2e-6, atol=0)
        assert found.magnitude == pytest.approx(magnitude)


def test_one_object_for_all_kinds_is_a_variant() -> None:
    """transformers leaves it out there, and goes on with what each kind has by default."""
    with pytest.raises(UnbuiltVariantError, match="rope_theta means nothing there"):
        parsed("Olmo3", rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
