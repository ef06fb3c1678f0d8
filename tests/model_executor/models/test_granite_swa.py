"""Granite with windows: Granite's multipliers, sinks, and thetas of each layer."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "num_key_value_heads": None}], ids=str)
def test_defaults(fields):
    ours, theirs = check_defaults("GraniteSWA", **fields)
    assert (ours.embedding_scale, ours.logits_scale) == (1.0, 1.0)
    for attention in (layer.attention for layer in ours.layers):
        assert (attention.has_sinks, attention.scale) == (True, 1.0)
        assert attention.has_output_bias == theirs.attention_bias


def test_thetas_of_layers():
    ours = parsed("GraniteSWA", num_hidden_layers=3, layer_rope_theta=[0, 1e4, 5.0], rope_theta=9e3)
    rotaries = [layer.attention.rotary for layer in ours.layers]
    assert [rotary and rotary.theta for rotary in rotaries] == [None, 1e4, 5.0]


def test_what_is_refused():
    check_refused("GraniteSWA", "must be 24 numbers", layer_rope_theta=[1e4])
    check_refused("GraniteSWA", "must be 24 numbers", layer_rope_theta=[-1.0] * 24)
