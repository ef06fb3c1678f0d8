"""Phi 3: old names of LongRoPE, and an original length that wins over the rotary embedding's own."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import LongRopeScaling
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed, windows

FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 2047}, {"num_key_value_heads": 8}], ids=str)
def test_defaults(fields):
    ours, theirs = check_defaults("Phi3", **fields)
    assert set(windows(ours)) == {theirs.sliding_window}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_names_of_longrope(name, key):
    found = parsed("Phi3", rope_scaling={key: name, **FACTORS}, max_position_embeddings=131072, rope_theta=5e4)
    rotary = found.layers[0].attention.rotary
    assert rotary is not None
    assert rotary.scaling == LongRopeScaling((1.0,) * 48, (2.0,) * 48, 4096)
    assert rotary.theta == 5e4
    assert rotary.magnitude == pytest.approx(1.190238)  # sqrt(1 + ln 32 / ln 4096)
    assert found.short_text_tokens == 4096


def test_the_outer_original_length_wins():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 100, **FACTORS}
    assert parsed("Phi3", rope_parameters=rope).short_text_tokens == 4096
    assert parsed("Phi3", rope_parameters=rope, original_max_position_embeddings=64).short_text_tokens == 64


def test_a_part_of_each_head():
    for fields in ({"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}):
        rotary = parsed("Phi3", **fields).layers[0].attention.rotary
        assert rotary is not None
        assert rotary.dim == 72


def test_what_is_refused():
    check_refused("Phi3", "Phi 3 has default and longrope", rope_scaling={"rope_type": "linear", "factor": 2.0})
    check_refused("Phi3", "48 numbers", rope_scaling={"rope_type": "longrope", **FACTORS, "long_factor": [1.0]})
