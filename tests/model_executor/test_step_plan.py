"""Which requests and tokens a plan's samples are of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lamella.errors import InvariantError
from lamella.model_executor.decode_graphs import padding_plan
from lamella.model_executor.step_plan import StepPlan


def plan_of(num_new: list[int], num_sampled: list[int]) -> StepPlan:
    plan = padding_plan(len(num_new), (1,))
    return dataclasses.replace(plan, query_start=np.cumsum([0, *num_new]), num_sampled=np.array(num_sampled, dtype=int))


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_behind_the_last_tokens_of_each_request_in_order(seed):
    generator = np.random.default_rng(seed)
    num_new = generator.integers(1, 9, size=generator.integers(1, 7)).tolist()
    num_sampled = [int(generator.integers(0, length + 1)) for length in num_new]
    tokens = [(request, token) for request, length in enumerate(num_new) for token in range(length)]
    expected = [
        (request, place)
        for place, (request, token) in enumerate(tokens)
        if num_new[request] - token <= num_sampled[request]
    ]
    plan = plan_of(num_new, num_sampled)
    assert plan.num_samples == len(expected)
    assert plan.sample_requests.tolist() == [request for request, _ in expected]
    assert plan.sampled_tokens.tolist() == [place for _, place in expected]


@pytest.mark.parametrize(
    ("num_sampled", "message"),
    [
        ([1, 3], r"num_sampled is \[1, 3\] for requests of \[1, 2\] new tokens; each must lie between 0 and"),
        ([-1, 2], r"num_sampled is \[-1, 2\] for requests of \[1, 2\] new tokens"),
        ([1], r"num_sampled has shape \[1\]; 2 requests take \[2\]"),
        ([[1, 1]], r"num_sampled has shape \[1, 2\]; 2 requests take \[2\]"),
    ],
)
def test_counts_that_no_request_can_have_are_refused(num_sampled, message):
    with pytest.raises(InvariantError, match=message):
        plan_of([1, 2], num_sampled)
