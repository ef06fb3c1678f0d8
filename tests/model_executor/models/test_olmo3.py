"""OLMo 2 and 3: norms after each part; old rotary keys of OLMo 3 are about full layers."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import NormPlaces
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("name", ["Olmo2", "Olmo3"])
@pytest.mark.parametrize("fields", [{}, {"num_attention_heads": 16, "num_key_value_heads": 4}], ids=str)
def test_defaults(name, fields):
    ours, _ = check_defaults(name, **fields)
    for layer in ours.layers:
        assert layer.norms == NormPlaces(False, True, False, True)
        assert layer.attention.qk_norm == "projection"


def thetas(config):
    return {layer.attention.kind: layer.attention.rotary.theta for layer in config.layers}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 1e4},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 3e4}}},
        {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 3e4}}, "rope_theta": 7.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e4},
    ],
    ids=str,
)
def test_rotary_embeddings(fields):
    ours, theirs = check_defaults("Olmo3", **fields)
    assert thetas(ours) == {kind: theirs.rope_parameters[kind]["rope_theta"] for kind in (FULL, SLIDING)}
    divisors = {layer.attention.kind: layer.attention.rotary.position_divisor for layer in ours.layers}
    assert divisors == {kind: theirs.rope_parameters[kind].get("factor", 1.0) for kind in (FULL, SLIDING)}


def test_what_is_refused():
    check_refused("Olmo3", "rope_theta means nothing there", rope_parameters={"rope_theta": 1e4})
    check_refused("Olmo3", "sliding_window=None", sliding_window=None)
    assert parsed("Olmo3", sliding_window=None, layer_types=[FULL] * 32).num_layers == 32
