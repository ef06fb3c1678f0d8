"""Phi-3.5-MoE: LayerNorms, two experts whatever the config says, and one magnitude of its LongRoPE."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import LongRopeScaling
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed, windows
from tests.helpers.parsed_experts import experts_of, sizes_of

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.5] * 64,
    "long_factor": [3.0] * 64,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "fields", [{}, {"lm_head_bias": True, "attention_bias": True}, {"num_local_experts": 4}], ids=str
)
def test_defaults(fields):
    ours, theirs = check_defaults("Phimoe", **fields)
    assert sizes_of(ours) == (theirs.num_local_experts, 2, theirs.intermediate_size)
    assert experts_of(ours).router.jitter == theirs.router_jitter_noise
    assert (ours.norm_kind, ours.norm_has_bias) == ("layer", True)
    assert ours.has_head_bias == theirs.lm_head_bias
    assert windows(parsed("Phimoe", sliding_window=9, num_hidden_layers=2)) == [9, 9]


def test_longrope_keeps_its_short_divisors():
    rotary = parsed("Phimoe", rope_parameters=LONGROPE).layers[0].attention.rotary
    assert rotary is not None
    assert rotary.scaling == LongRopeScaling((1.5,) * 64, (1.5,) * 64, 4096)
    assert rotary.magnitude == 1.25


def test_what_is_refused():
    check_refused("Phimoe", "the sparse mixer picks 2", num_experts_per_tok=1)
    check_refused("Phimoe", "long_mscale=1.5", rope_parameters={**LONGROPE, "long_mscale": 1.5})
