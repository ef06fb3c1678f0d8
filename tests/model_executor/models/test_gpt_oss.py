"""GPT-OSS: YaRN where the config has no rotary embedding of its own, sinks, biases and bounds."""

from __future__ import annotations

import math

import pytest

from lamella.model_executor.models.config import YarnScaling
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed
from tests.helpers.parsed_experts import experts_of, sizes_of


@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_bias": False}, {"swiglu_limit": 3.0, "swiglu_alpha": 1.0}, {"num_local_experts": 32}],
    ids=str,
)
def test_defaults(fields):
    ours, theirs = check_defaults("GptOss", **fields)
    assert sizes_of(ours) == (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size)
    expert = experts_of(ours).expert
    assert expert.has_bias
    assert expert.clamp is not None
    assert (expert.clamp.limit, expert.clamp.slope) == (theirs.swiglu_limit, theirs.swiglu_alpha)
    assert (expert.clamp.up_offset, expert.clamp.after_activation) == (1.0, False)
    for layer in ours.layers:
        assert layer.attention.has_sinks
        assert layer.attention.has_qkv_bias == layer.attention.has_output_bias == theirs.attention_bias


def test_the_embedding_that_is_left_out():
    rotary = parsed("GptOss").layers[0].attention.rotary
    assert rotary is not None
    assert rotary.scaling == YarnScaling(32.0, 4096, truncate=False)
    assert rotary.theta == 150_000
    assert rotary.magnitude == pytest.approx(0.1 * math.log(32) + 1)
    linear = parsed("GptOss", rope_parameters={"rope_type": "linear", "factor": 2.0}).layers[0].attention.rotary
    assert linear is not None
    assert (linear.scaling, linear.position_divisor, linear.theta) == (None, 2.0, 150_000)


def test_what_is_refused():
    check_refused("GptOss", "sliding_window", sliding_window=None)
    check_refused("GptOss", "num_experts_per_tok=129", num_experts_per_tok=129)
