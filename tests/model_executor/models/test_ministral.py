"""Ministral: a window that is left out is 4,096, one that is null none. Ministral 3: queries grow with positions."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import QueryScaleConfig, YarnScaling
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed, windows

ROPE = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 12, "head_dim": 64}], ids=str)
def test_defaults(fields):
    check_defaults("Ministral", **fields)


def test_layers_with_and_without_a_window():
    found = parsed(
        "Ministral", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=7
    )
    assert windows(found) == [None, 7]


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9}, {"max_position_embeddings": 1000}], ids=str)
def test_defaults_of_3(fields):
    ours, theirs = check_defaults("Ministral3", **fields)
    assert set(windows(ours)) == {theirs.sliding_window}
    attention = ours.layers[0].attention
    assert attention.rotary is not None
    assert attention.rotary.scaling == YarnScaling(16.0, 16384)
    assert (attention.rotary.theta, attention.rotary.magnitude) == (1e6, 1.0)
    assert attention.query_scale == QueryScaleConfig(0.1, 16384)


def test_the_period_of_queries_is_the_original_length():
    found = parsed("Ministral3", rope_parameters={**ROPE, "llama_4_scaling_beta": 0.5})
    assert found.layers[0].attention.query_scale == QueryScaleConfig(0.5, 64)
    over = parsed(
        "Ministral3", rope_parameters={**ROPE, "llama_4_scaling_beta": 0.5}, original_max_position_embeddings=32
    )
    assert over.layers[0].attention.query_scale == QueryScaleConfig(0.5, 32)


def test_a_scale_is_wanted():
    check_refused("Ministral3", "llama_4_scaling_beta is missing", rope_parameters=ROPE)
