"""CWM: rotary scaling and end tokens that are left out are Llama 3's."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import BlendedScaling
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9, "head_dim": 64}, {"eos_token_id": None}], ids=str)
def test_defaults(fields):
    ours, _ = check_defaults("Cwm", **fields)
    for layer in ours.layers:
        assert layer.attention.rotary is not None
        assert layer.attention.rotary.theta == 1e6
        assert layer.attention.rotary.scaling == BlendedScaling(16.0, 1.0, 4.0, 8192)


def test_a_rotary_embedding_that_is_given():
    rotary = parsed("Cwm", rope_parameters={"rope_type": "default", "rope_theta": 5e4}).layers[0].attention.rotary
    assert rotary is not None
    assert (rotary.theta, rotary.scaling) == (5e4, None)


def test_what_is_refused():
    check_refused("Cwm", "sliding_window=None", sliding_window=None)
