"""Cohere 2: positions on sliding layers alone, one LayerNorm, logits scaled."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, kinds, parsed


@pytest.mark.parametrize(
    "fields",
    [{}, {"logit_scale": 0.5, "layer_norm_eps": 1e-3}, {"num_key_value_heads": 8, "sliding_window": 5}],
    ids=str,
)
def test_defaults(fields):
    ours, theirs = check_defaults("Cohere2", **fields)
    assert (ours.norm_kind, ours.norm_has_bias, ours.logits_scale) == ("layer", False, theirs.logit_scale)
    for layer in ours.layers:
        assert layer.is_parallel
        assert (layer.attention.rotary is None) == (layer.attention.kind == "full_attention")


def test_an_old_pattern():
    assert (
        kinds(parsed("Cohere2", num_hidden_layers=4, sliding_window_pattern=2))
        == [
            "sliding_attention",
            "full_attention",
        ]
        * 2
    )


def test_head_dim_is_not_read():
    assert parsed("Cohere2", head_dim=64).layers[0].attention.k_dim == 128


def test_what_is_refused():
    check_refused("Cohere2", "sliding_window=None", sliding_window=None)
