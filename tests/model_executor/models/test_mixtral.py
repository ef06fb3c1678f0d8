"""Mixtral: experts in every layer, renormalised; no window unless one is given."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, windows
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize("fields", [{}, {"num_local_experts": 4, "num_experts_per_tok": 3}, {"head_dim": 64}], ids=str)
def test_defaults(fields):
    ours, theirs = check_defaults("Mixtral", **fields)
    assert sparse_layers(ours) == list(range(theirs.num_hidden_layers))
    assert sizes_of(ours) == (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size)
    assert experts_of(ours).router.is_renormalised
    rotary = ours.layers[0].attention.rotary
    assert rotary is not None
    assert rotary.theta == theirs.rope_parameters["rope_theta"] == 1e6
    assert set(windows(ours)) == {None}


def test_what_is_refused():
    check_refused("Mixtral", "num_experts_per_tok=9, and a token can choose from 8 experts", num_experts_per_tok=9)
    check_refused("Mixtral", "num_local_experts=0", num_local_experts=0)
