"""Configs of Llama's shape: defaults are transformers', and what is not built is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields
from tests.helpers.published_configs import parsed, theirs

ARCHITECTURES = ("Llama", "Mistral", "Qwen2")


def equal(ours: ModelConfig, config: Any) -> None:
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
    )
    assert ours.norm_eps == config.rms_norm_eps
    assert ours.max_position_embeddings == config.max_position_embeddings
    assert ours.tie_word_embeddings == config.tie_word_embeddings
    assert ours.bos_token_id == config.bos_token_id
    assert ours.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in ours.layers:
        attention = layer.attention
        assert (attention.num_heads, attention.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
        assert (attention.k_dim, attention.v_dim) == (head_dim, head_dim)
        assert attention.scale == head_dim**-0.5
        assert attention.rotary is not None
        assert (attention.rotary.dim, attention.rotary.theta) == (head_dim, config.rope_parameters["rope_theta"])
        assert attention.rotary.position_divisor == config.rope_parameters.get("factor", 1.0)
        assert layer.mlp.width == config.intermediate_size


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_attention_heads": 16, "num_key_value_heads": 8},
        {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 3e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_scaling": None},
        {"bos_token_id": 3, "eos_token_id": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)
def test_fields_and_defaults_are_those_of_transformers(architecture: str, fields: dict[str, Any]) -> None:
    equal(parsed(architecture, **fields), theirs(architecture, **fields))


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_kv_heads_that_are_null_are_as_many_as_heads(architecture: str) -> None:
    fields = {"num_attention_heads": 16, "num_key_value_heads": None}
    equal(parsed(architecture, **fields), theirs(architecture, **fields))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size=100.*multiple of num_attention_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, "6 attention heads cannot share 4"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope type 'axial' is not built"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "high_freq_factor is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "mrope_section": [1]}},
            r"mrope_section=\[1\]: it is not known",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"eos_token_id": 10**6}, "eos_token_id=1000000"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(architecture: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        parsed(architecture, **fields)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_end_tokens_of_the_generation_config_win(architecture: str) -> None:
    fields = {"architectures": [f"{architecture}ForCausalLM"], "eos_token_id": 5}
    assert parsed(architecture, eos_token_id=5).eos_token_ids == (5,)
    assert parse_config(TypedFields(fields, "config.json"), (7, 8)).eos_token_ids == (7, 8)
