"""SmolLM3: a 1 in no_rope_layers means that the layer embeds positions; windows are of the others."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


def turns(config):
    return [int(layer.attention.rotary is not None) for layer in config.layers]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": [1, 0] * 18},
        {"use_sliding_window": True, "sliding_window": 9},
        {"use_sliding_window": True},
        {"sliding_window": 9},
        {"mlp_bias": True, "attention_bias": True},
    ],
    ids=str,
)
def test_defaults(fields):
    ours, theirs = check_defaults("SmolLM3", **fields)
    assert turns(ours) == theirs.no_rope_layers
    rotary = ours.layers[0].attention.rotary
    assert rotary is not None
    assert rotary.theta == 2e6


def test_what_is_refused():
    check_refused("SmolLM3", "entry for each of the 36 layers", no_rope_layers=[])
    check_refused("SmolLM3", "no_rope_layers", no_rope_layers=[2] * 36)
    assert turns(parsed("SmolLM3", num_hidden_layers=2, no_rope_layers=[0, 1, 1])) == [0, 1]
