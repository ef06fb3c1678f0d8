"""The batched intervals are those that one finds token by token."""

import random

import pytest

from lamella.observability.bucket_counts import BucketCounts, one_two_five
from lamella.observability.token_intervals import TokenIntervals

BOUNDS = (0.5, 1.5, 2.5, 4.5, 9.5)


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_a_look_at_each_request_in_each_step(seed):
    rng = random.Random(seed)
    counts = BucketCounts(BOUNDS)
    intervals = TokenIntervals(counts)
    running, told, last, expected, now = [], [], {}, [], 0.0
    for _ in range(300):
        now += rng.randint(1, 6)
        if rng.random() < 0.2:
            running = [*running, object()]
            told = list(running)
        if running and rng.random() < 0.1:  # one is preempted for this step, and is told of again later
            told = [one for one in running if rng.random() < 0.7]
        elif len(told) != len(running):
            told = list(running)
        if told and rng.random() < 0.05:
            told = [*told, told[-1]]  # speculation gives one request several tokens
        intervals.step(told, now)
        for one in dict.fromkeys(told):
            if one in last:
                expected.append(now - last[one])
            last[one] = now
        if running and rng.random() < 0.1:
            gone = running[rng.randrange(len(running))]
            running = [one for one in running if one is not gone]
            told = list(running)
            intervals.end(gone)
    intervals.count()
    assert len(expected) > 100
    assert counts.count == len(expected)
    assert counts.sum == sum(expected)
    assert counts.cumulative() == [
        *((str(bound), sum(value <= bound for value in expected)) for bound in BOUNDS),
        ("+Inf", len(expected)),
    ]


def test_bounds_for_tokens():
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]


def test_a_value_on_a_bound_counts_up_to_it():
    counts = BucketCounts((1, 2))
    counts.observe_all([1, 2, 3], times=2)
    assert counts.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 6)]
    assert (counts.count, counts.sum) == (6, 12)
