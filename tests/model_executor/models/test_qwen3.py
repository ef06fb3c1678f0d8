"""Qwen3: head_dim is 128 unless it is given, windows begin at max_window_layers."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, kinds, parsed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8},
        {"use_sliding_window": True, "num_hidden_layers": 30},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9},
        {"num_key_value_heads": None},
    ],
    ids=str,
)
def test_defaults(fields):
    ours, _ = check_defaults("Qwen3", **fields)
    assert {layer.attention.qk_norm for layer in ours.layers} == {"heads"}


def test_biases_are_of_all_four_projections():
    attention = parsed("Qwen3", attention_bias=True).layers[0].attention
    assert (attention.has_qkv_bias, attention.has_output_bias) == (True, True)


def test_windows_that_are_switched_off():
    assert set(kinds(parsed("Qwen3", sliding_window=8, max_window_layers=0))) == {"full_attention"}
