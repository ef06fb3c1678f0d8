"""Granite with experts: Granite's multipliers, a router that renormalises, and a shared expert where there is one."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize("name", ["GraniteMoe", "GraniteMoeShared"])
@pytest.mark.parametrize(
    "fields", [{}, {"attention_bias": True}, {"num_local_experts": 6, "num_experts_per_tok": 3}], ids=str
)
def test_defaults(name, fields):
    ours, theirs = check_defaults(name, **fields)
    assert sizes_of(ours) == (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size)
    assert sparse_layers(ours) == list(range(theirs.num_hidden_layers))
    assert (experts_of(ours).router.is_renormalised, experts_of(ours).shared) == (True, None)


def test_multipliers_and_the_shared_expert():
    ours = parsed(
        "GraniteMoeShared", embedding_multiplier=12.0, residual_multiplier=0.5, logits_scaling=8.0, rms_norm_eps=1e-5,
        shared_intermediate_size=24,
    )  # fmt: skip
    assert (ours.embedding_scale, ours.norm_eps, ours.logits_scale) == (24.0, 4e-5, 0.125)
    shared = experts_of(ours).shared
    assert shared is not None
    assert shared.width == 24


def test_what_is_refused():
    check_refused("GraniteMoe", "num_experts_per_tok=9", num_experts_per_tok=9)
    check_refused("GraniteMoe", "residual_multiplier=0", residual_multiplier=0)
