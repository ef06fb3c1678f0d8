"""The order in which prompts that share prefixes are visited, over a cache that keeps every prompt that started."""

from __future__ import annotations

import random

import pytest

from lamella.engine.scheduling.branch_order import BranchOrder
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_match import PrefixMatch
from tests.helpers.made_requests import make_request


def shared_tokens(one, other):
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num


class Visits:
    """Prompts by name; a match is what the started ones have in common with a prompt, but for its last token."""

    def __init__(self, prompts):
        self.prompts = {f"r{index}": tuple(prompt) for index, prompt in enumerate(prompts)}
        self.requests = {name: make_request(name, prompt) for name, prompt in self.prompts.items()}
        self.started = []
        self.order = BranchOrder(self.match)

    def match(self, request):
        prompt = self.prompts[request.request_id]
        num = max((shared_tokens(prompt, self.prompts[name]) for name in self.started), default=0)
        return PrefixMatch(min(num, len(prompt) - 1), [], NO_NODE, num)

    def run(self):
        for request in self.requests.values():
            self.order.add(request, self.match(request).num_tokens)
        while len(self.order):
            request, match = self.order.next()
            assert match == self.match(request)
            self.order.start(request)
            self.started.append(request.request_id)
        return [self.prompts[name] for name in self.started]


@pytest.mark.parametrize("seed", range(30))
def test_all_who_share_a_prefix_come_one_after_the_other(seed):
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(2, 7))] + [2 + index] for index in range(25)]
    visited = Visits(prompts).run()
    assert sorted(visited) == sorted(map(tuple, prompts))
    for prefix in {prompt[:length] for prompt in visited for length in range(1, len(prompt))}:
        places = [place for place, prompt in enumerate(visited) if prompt[: len(prefix)] == prefix]
        assert places == list(range(places[0], places[0] + len(places))), prefix


def test_the_longest_cached_prefix_is_first_and_of_equals_the_oldest():
    visits = Visits([[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [2, 2, 4, 4]])
    visits.started = ["r3"]
    for name in ("r0", "r1", "r2"):
        visits.order.add(visits.requests[name], visits.match(visits.requests[name]).num_tokens)
    seen = []
    while len(visits.order):
        request, _ = visits.order.next()
        visits.order.start(request)
        seen.append(request.request_id)
    assert seen == ["r1", "r0", "r2"]


def test_who_leaves_without_starting_is_visited_no_more():
    visits = Visits([[1, 1, 5], [1, 1, 6], [2, 2, 7]])
    for request in visits.requests.values():
        visits.order.add(request, 0)
    assert visits.order.parting_tokens(visits.requests["r0"]) == 2
    visits.order.discard(visits.requests["r0"])
    assert visits.order.parting_tokens(visits.requests["r1"]) == 0
    assert len(visits.order) == 2
    request, _ = visits.order.next()
    assert request is visits.requests["r1"]
