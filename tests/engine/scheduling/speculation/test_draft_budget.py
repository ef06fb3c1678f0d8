"""The number of drafts against the best of all choices."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from lamella.engine.scheduling.speculation.draft_budget import LEAST_GAIN, num_drafts_each
from lamella.engine.scheduling.speculation.step_costs import StepCosts


def rate(costs, num_tokens, chances, counts):
    expected = num_tokens + sum(sum(one[:count]) for one, count in zip(chances, counts, strict=True))
    return expected / float(costs.seconds(np.array([num_tokens + sum(counts)]))[0])


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_gives_more_tokens_a_second(seed):
    draw = random.Random(seed)
    sizes = [1, 2, 4, 6, 9, 14]
    costs = StepCosts(sizes, sorted(draw.uniform(1, 6) for _ in sizes))
    num_tokens, most = draw.randint(1, 4), draw.choice([100, 5, 1])
    chances = [
        sorted((draw.random() for _ in range(draw.randint(0, 4))), reverse=True) for _ in range(draw.randint(1, 3))
    ]
    counts = num_drafts_each(costs, num_tokens, chances, most)
    every = [choice for choice in itertools.product(*(range(len(one) + 1) for one in chances)) if sum(choice) <= most]
    best = max(rate(costs, num_tokens, chances, choice) for choice in every)
    none = rate(costs, num_tokens, chances, [0] * len(chances))
    if best < (1 + LEAST_GAIN) * none - 1e-12:
        assert sum(counts) == 0
    else:
        assert tuple(counts) in every
        assert rate(costs, num_tokens, chances, counts) == pytest.approx(best)


def test_drafts_ride_only_where_weights_are_read_anyway():
    """A step that is bound by reading weights takes drafts along, one that is bound by arithmetic does not."""
    sure = [[0.9] * 8]
    assert num_drafts_each(StepCosts([1, 16], [1.0, 1.1]), 1, sure, 99) == [8]
    assert num_drafts_each(StepCosts([1, 16], [1.0, 16.0]), 1, sure, 99) == [0]
    assert num_drafts_each(StepCosts([1, 16], [1.0, 1.1]), 1, [[0.01] * 8], 99) == [0]
    assert num_drafts_each(StepCosts([1], [1.0]), 1, [], 99) == []
