"""Gemma 4: heads by kind of layer, whose V may be K, and layers that read others'."""

from __future__ import annotations

import json

import pytest

from lamella.model_executor.models.config import ProportionalScaling
from tests.helpers.parsed_configs import check_refused, kinds, parsed, windows

FULL, SLIDING = "full_attention", "sliding_attention"


def sizes(config):
    return [(layer.attention.num_kv_heads, layer.attention.k_dim) for layer in config.layers]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 7},
        {"layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 64},
        {"num_global_key_value_heads": 2},
        {"num_kv_shared_layers": 10, "use_double_wide_mlp": True},
    ],
    ids=str,
)
def test_layers(fields):
    import transformers

    ours, theirs = parsed("Gemma4", **fields), transformers.Gemma4TextConfig(**fields)
    assert kinds(ours) == theirs.layer_types
    layers = [theirs.per_layer_config[index] for index in range(theirs.num_hidden_layers)]
    assert sizes(ours) == [(layer.num_key_value_heads, layer.head_dim) for layer in layers]
    assert windows(ours) == [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types]
    reuses = [mode == "reuse" for mode in theirs.kv_sharing_modes]
    assert [layer.attention.kv_owner is not None for layer in ours.layers] == reuses
    width = theirs.intermediate_size
    assert [layer.mlp.width for layer in ours.layers] == [
        2 * width if reused and theirs.use_double_wide_mlp else width for reused in reuses
    ]
    for layer in ours.layers:
        attention = layer.attention
        assert (attention.scale, attention.qk_norm, attention.has_value_norm) == (1.0, "heads", True)
        assert attention.values_are_keys == (theirs.attention_k_eq_v and attention.kind == FULL)
        assert attention.rotary is not None
        if attention.kind == FULL:
            assert attention.rotary.scaling == ProportionalScaling(attention.k_dim // 8)


def test_what_transformers_saves_is_read_again():
    import transformers

    fields = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 64}
    saved = json.loads(transformers.Gemma4TextConfig(**fields).to_json_string(use_diff=False))
    del saved["architectures"]
    assert "global_head_dim" not in saved
    assert sizes(parsed("Gemma4", **saved)) == sizes(parsed("Gemma4", **fields))


def test_inputs_of_each_layer():
    assert parsed("Gemma4", hidden_size_per_layer_input=0).per_layer_input is None
    found = parsed("Gemma4", hidden_size_per_layer_input=32, vocab_size_per_layer_input=99).per_layer_input
    assert found is not None
    assert (found.width, found.vocab_size, found.activation) == (32, 99, "gelu_tanh")


def test_what_is_refused():
    check_refused("Gemma4", "encoder", use_bidirectional_attention="all")
    check_refused("Gemma4", "rope_theta is missing", rope_parameters={FULL: {}, SLIDING: {}})
    check_refused("Gemma4", "hidden_size=3: it is not built layer by layer", per_layer_config={"0": {"hidden_size": 3}})
