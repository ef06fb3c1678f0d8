"""AFMoE: full layers embed no positions, and the shared expert is as wide as so many experts."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_dense_layers": 3, "num_shared_experts": 1},
        {"global_attn_every_n_layers": 2, "sliding_window": 9},
        {"mup_enabled": True, "route_scale": 2.0, "attention_bias": True},
        {"route_norm": False},  # transformers does not read it either
    ],
    ids=str,
)
def test_defaults(fields):
    ours, theirs = check_defaults("Afmoe", **fields)
    assert sizes_of(ours) == (theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    experts = experts_of(ours)
    assert experts.shared is not None
    assert experts.shared.width == theirs.moe_intermediate_size * theirs.num_shared_experts
    assert (experts.router.scale, experts.router.is_renormalised) == (theirs.route_scale, True)
    assert sparse_layers(ours) == list(range(theirs.num_dense_layers, theirs.num_hidden_layers))
    assert ours.embedding_scale == (theirs.hidden_size**0.5 if theirs.mup_enabled else 1.0)
    for layer in ours.layers:
        assert (layer.attention.rotary is None) == (layer.attention.kind == "full_attention")
        assert layer.attention.gate is not None
        assert not layer.attention.gate.is_per_head


def test_what_is_refused():
    check_refused("Afmoe", "sliding_window", sliding_window=None)
    check_refused("Afmoe", "num_experts_per_tok=65", num_experts_per_tok=65)
