"""Granite: the residual multiplier is in the embeddings' scale and the norms' epsilon."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "num_key_value_heads": None}], ids=str)
def test_defaults(fields):
    ours, theirs = check_defaults("Granite", **fields)
    attention = ours.layers[0].attention
    assert (ours.embedding_scale, ours.logits_scale, attention.scale) == (1.0, 1.0, 1.0)
    assert not attention.has_sinks
    assert attention.has_output_bias == theirs.attention_bias


def test_multipliers():
    ours = parsed(
        "Granite", embedding_multiplier=12.0, residual_multiplier=0.5, logits_scaling=8.0, attention_multiplier=0.015,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    assert (ours.embedding_scale, ours.norm_eps, ours.logits_scale) == (24.0, 4e-5, 0.125)
    assert ours.layers[0].attention.scale == 0.015


def test_what_is_refused():
    check_refused("Granite", "residual_multiplier=0", residual_multiplier=0)
