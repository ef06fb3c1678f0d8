"""Who is next by each policy, over a cache whose hits are given."""

from __future__ import annotations

import random

import pytest

from lamella.engine.scheduling.waiting_order import MAX_WAIT_STEPS, ArrivalOrder, PrefixOrder
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_match import PrefixMatch
from tests.helpers.made_requests import make_request


def match_of(hits):
    return lambda request: PrefixMatch(hits.get(request.request_id, 0), [], NO_NODE, 0)


def test_by_arrival_the_oldest_is_next_whatever_the_cache_has():
    draw = random.Random(3)
    order, expected = ArrivalOrder(match_of({"r3": 4, "r7": 5})), []
    for index in range(40):
        request = make_request(f"r{index}", range(6))
        order.add(request, index, 0)
        expected.append(request)
        if index % 3 == 2:
            leaving = draw.choice(expected)
            (order.start if index % 2 else order.discard)(leaving)
            expected.remove(leaving)
            assert leaving not in order
        request, match = order.next(index)
        assert request is expected[0]
        assert match.num_tokens == {"r3": 4, "r7": 5}.get(request.request_id, 0)
        assert list(order) == expected
        assert len(order) == len(expected)


@pytest.mark.parametrize(("waited", "first"), [(MAX_WAIT_STEPS - 1, "new"), (MAX_WAIT_STEPS, "old")])
def test_by_prefix_later_ones_overtake_for_so_long(waited, first):
    order = PrefixOrder(match_of({"new": 5}))
    order.add(make_request("old", range(10, 16)), 7, 0)
    order.add(make_request("new", range(6)), 8, 5)
    request, _ = order.next(7 + waited)
    assert request.request_id == first
    assert order.has_overdue == (first == "old")


def test_by_prefix_an_overdue_age_is_visited_to_its_end():
    """Among each other its prompts go by the cache."""
    order = PrefixOrder(match_of({"new": 5, "b": 3}))
    for name, prompt in (("a", range(10, 16)), ("b", range(20, 26))):
        order.add(make_request(name, prompt), 7, 3 * (name == "b"))
    order.add(make_request("new", range(6)), 8, 5)
    seen = []
    while len(order):
        request, _ = order.next(7 + MAX_WAIT_STEPS)
        order.start(request)
        seen.append(request.request_id)
    assert seen == ["b", "a", "new"]
    assert not order.has_overdue
