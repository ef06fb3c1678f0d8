"""Granite: the residual multiplier is in the embeddings' scale and the norms' epsilon; thetas of each layer."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


@pytest.mark.parametrize("name", ["Granite", "GraniteSWA"])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "num_key_value_heads": None}], ids=str)
def test_defaults(name, fields):
    ours, theirs = check_defaults(name, **fields)
    attention = ours.layers[0].attention
    assert (ours.embedding_scale, ours.logits_scale, attention.scale) == (1.0, 1.0, 1.0)
    assert attention.has_sinks == (name == "GraniteSWA")
    assert attention.has_output_bias == theirs.attention_bias


def test_multipliers():
    ours = parsed(
        "Granite", embedding_multiplier=12.0, residual_multiplier=0.5, logits_scaling=8.0, attention_multiplier=0.015,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    assert (ours.embedding_scale, ours.norm_eps, ours.logits_scale) == (24.0, 4e-5, 0.125)
    assert ours.layers[0].attention.scale == 0.015


def test_thetas_of_layers():
    ours = parsed("GraniteSWA", num_hidden_layers=3, layer_rope_theta=[0, 1e4, 5.0], rope_theta=9e3)
    rotaries = [layer.attention.rotary for layer in ours.layers]
    assert [rotary and rotary.theta for rotary in rotaries] == [None, 1e4, 5.0]


def test_what_is_refused():
    check_refused("Granite", "residual_multiplier=0", residual_multiplier=0)
    check_refused("GraniteSWA", "must be 24 numbers", layer_rope_theta=[1e4])
    check_refused("GraniteSWA", "must be 24 numbers", layer_rope_theta=[-1.0] * 24)
