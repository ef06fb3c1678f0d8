"""Laguna: heads and embeddings by layer, gates by word, and a cap on the router's logits that 0 switches off."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_refused, kinds, parsed
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gating": "per-element", "moe_router_logit_softcapping": 2.0, "moe_routed_scaling_factor": 1.5},
        {"gating": "per-head", "num_attention_heads_per_layer": [16, 32], "num_hidden_layers": 2},
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 5},
        {"mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2},
        {"rope_theta": 7.0},  # transformers does not read it either
    ],
    ids=str,
)
def test_defaults(fields):
    from transformers import LagunaConfig

    ours, theirs = parsed("Laguna", **fields), LagunaConfig(**fields)
    assert kinds(ours) == theirs.layer_types
    assert [layer.attention.num_heads for layer in ours.layers] == theirs.num_attention_heads_per_layer
    for layer in ours.layers:
        parameters = theirs.rope_parameters[layer.attention.kind]
        rotary, gate = layer.attention.rotary, layer.attention.gate
        assert rotary is not None
        assert (rotary.theta, rotary.dim) == (parameters["rope_theta"], int(128 * parameters["partial_rotary_factor"]))
        assert gate is not None
        assert (gate.activation, gate.is_per_head) == ("softplus", theirs.gating in (True, "per-head"))
    assert sizes_of(ours) == (theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    assert sparse_layers(ours) == [layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    router = experts_of(ours).router
    assert (router.logit_cap or 0.0, router.scale) == (
        theirs.moe_router_logit_softcapping,
        theirs.moe_routed_scaling_factor,
    )


def test_what_is_refused():
    check_refused("Laguna", "num_attention_heads_per_layer", num_attention_heads_per_layer=[48])
    check_refused("Laguna", "does not run it either", moe_apply_router_weight_on_input=True)
