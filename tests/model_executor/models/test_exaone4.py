"""EXAONE 4: full layers know positions where no layer slides."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import NormPlaces
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5, "sliding_window_pattern": 3}], ids=str)
def test_defaults(fields):
    ours, _ = check_defaults("Exaone4", **fields)
    for layer in ours.layers:
        assert (layer.norms, layer.attention.qk_norm) == (NormPlaces(False, True, False, True), "heads")
        assert (layer.attention.rotary is None) == (layer.attention.kind == FULL)


@pytest.mark.parametrize("others", [{}, {"layer_types": [FULL] * 32}], ids=str)
def test_without_a_window_all_layers_know_positions(others):
    ours = parsed("Exaone4", sliding_window=None, **others)
    assert all(layer.attention.rotary is not None and layer.attention.kind == FULL for layer in ours.layers)


def test_what_is_refused():
    check_refused("Exaone4", "'LLLG': transformers takes a number", sliding_window_pattern="LLLG")
    check_refused("Exaone4", "sliding_window=None", sliding_window=None, layer_types=[SLIDING] * 32)
