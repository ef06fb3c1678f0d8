"""Qwen2: Llama's shape with biases on Q, K and V, and windows in the upper layers where the config asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ModelLoadError
from tests.helpers.published_configs import biases, parsed, theirs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 5, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=str,
)
def test_qwen2_slides_where_transformers_does(fields: dict[str, Any]) -> None:
    config = theirs("Qwen2", **fields)
    attentions = [layer.attention for layer in parsed("Qwen2", **fields).layers]
    assert [attention.kind for attention in attentions] == config.layer_types
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    assert [attention.window_tokens for attention in attentions] == [
        config.sliding_window if each else None for each in slides
    ]


def test_sliding_layers_without_a_window_are_refused() -> None:
    kinds = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelLoadError, match=r"layer_types.*use_sliding_window is off"):
        parsed("Qwen2", num_hidden_layers=2, layer_types=kinds)


def test_q_k_and_v_have_biases_and_nothing_else() -> None:
    assert biases(parsed("Qwen2")) == {(True, False, False)}


def test_layers_differ_in_their_windows_alone() -> None:
    config = parsed("Qwen2", use_sliding_window=True, num_hidden_layers=4, max_window_layers=2, sliding_window=9)
    full, sliding = config.layers[1].attention, config.layers[2].attention
    assert [layer.attention.window_tokens for layer in config.layers] == [None, None, 9, 9]
    for name in ("num_heads", "num_kv_heads", "k_dim", "v_dim", "scale", "rotary", "has_qkv_bias", "qk_norm"):
        assert getattr(full, name) == getattr(sliding, name)


@pytest.mark.parametrize("layers", [-1, 1.5, "28", True])
def test_a_first_window_layer_out_of_its_range_is_refused(layers: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"max_window_layers={layers!r}: must be an integer"):
        parsed("Qwen2", use_sliding_window=True, max_window_layers=layers)
