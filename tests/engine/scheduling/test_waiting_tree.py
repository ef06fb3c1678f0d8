"""The tree of waiting prompts against one made of dictionaries of token tuples, and what its operations cost."""

from __future__ import annotations

import random
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from lamella.engine.scheduling import waiting_tree as waiting_tree_module
from lamella.engine.scheduling.branch_order import BranchOrder
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.waiting_tree import Branch, WaitingTree
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from tests.helpers.offline import Prompt, request_of


def request(name: object, token_ids, salt: str | None = None) -> Request:
    return request_of(str(name), Prompt(np.array(token_ids, dtype=np.int32), salt), 1)


def key_of(one: Request) -> tuple:
    return (one.salt, *one.token_ids.tolist())


class BruteForce:
    """All prefixes of all waiting prompts, in dictionaries; a prefix is as old as its oldest visit that was not
    interrupted."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.since: dict[tuple, int] = {}
        self.num_added = 0

    def add(self, one: Request) -> None:
        self.waiting.append(one)
        self.num_added += 1
        key = key_of(one)
        for length in range(1, len(key) + 1):
            self.since.setdefault(key[:length], self.num_added)

    def remove(self, one: Request) -> None:
        self.waiting.remove(one)
        live = {key_of(other)[:length] for other in self.waiting for length in range(1, len(key_of(other)) + 1)}
        self.since = {prefix: since for prefix, since in self.since.items() if prefix in live}

    def depth_first(self) -> list[Request]:
        """A prompt before those that go on from it, the prefix that is there for longest before others."""
        if not self.waiting:
            return []
        longest = max(len(key_of(one)) for one in self.waiting)

        def place(one: Request) -> list[int]:
            key = key_of(one)
            ages = [self.since[key[:length]] for length in range(1, len(key) + 1)]
            return ages + [0] * (longest - len(ages))

        return sorted(self.waiting, key=place)  # equal prompts in the order of their coming

    def branching_prefixes(self) -> set[tuple]:
        """Roots, ends of prompts, and where prompts part."""
        following: dict[tuple, set] = {}
        for one in self.waiting:
            key = key_of(one)
            for length in range(1, len(key)):
                following.setdefault(key[:length], set()).add(key[length])
        return (
            {key_of(one) for one in self.waiting}
            | {prefix for prefix, tokens in following.items() if len(tokens) > 1}
            | {key_of(one)[:1] for one in self.waiting}
        )


def prefixes_of(tree: WaitingTree) -> list[tuple]:
    salt_of: dict[Branch, str | None] = {branch: salt for salt, branch in tree._roots.items()}
    prefixes = []
    for branch in tree.branches():
        root = branch
        while root.parent is not None:
            root = root.parent
        prefixes.append((salt_of[root], *branch.tokens[: branch.depth].tolist()))
    return prefixes


def random_request(draw: random.Random, index: int, others: list[Request]) -> Request:
    """Short prompts of few tokens; or a prompt like another, shorter or longer."""
    salt = draw.choice([None, None, "a"])
    tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
    if others and draw.random() < 0.5:
        other = draw.choice(others)
        salt, known = other.salt, other.token_ids.tolist()
        tokens = known[: draw.randrange(1, len(known) + 1)] + (tokens if draw.random() < 0.7 else [])
    return request(index, tokens, salt)


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_has_the_branches_and_the_order_that_brute_force_finds(seed):
    draw = random.Random(seed)
    tree, oracle = WaitingTree(), BruteForce()
    for index in range(120):
        if oracle.waiting and draw.random() < 0.4:
            one = draw.choice(oracle.waiting) if draw.random() < 0.5 else oracle.depth_first()[0]
            tree.remove(one)
            oracle.remove(one)
        else:
            one = random_request(draw, index, oracle.waiting)
            tree.add(one)
            oracle.add(one)
        prefixes = prefixes_of(tree)
        assert len(prefixes) == len(set(prefixes)) == tree.num_branches
        assert set(prefixes) == oracle.branching_prefixes()
        assert len(tree) == len(oracle.waiting)
        if oracle.waiting:
            assert tree.first(None) is oracle.depth_first()[0]


class EndlessCache:
    """A cache that keeps all that was started."""

    def __init__(self) -> None:
        self.started: list[tuple] = []

    def num_tokens(self, one: Request) -> int:
        key = key_of(one)
        return max((common_length(key, other) for other in self.started if other[0] == key[0]), default=0)

    def match(self, one: Request) -> PrefixMatch:
        return NO_MATCH._replace(num_tokens=min(self.num_tokens(one), len(one.token_ids) - 1))


def common_length(first: tuple, second: tuple) -> int:
    """Tokens, without the salt."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length - 1


@pytest.mark.parametrize("seed", range(20))
def test_each_prefix_is_visited_once_and_whole(seed):
    """Of prompts that were all there from the start: once a prefix has been left, nobody who shares it is left. And a
    prompt that is another's prefix comes first."""
    draw = random.Random(seed)
    cache = EndlessCache()
    order = BranchOrder(cache.match)
    waiting: list[Request] = []
    for index in range(100):
        waiting.append(random_request(draw, index, waiting))
    for one in draw.sample(waiting, len(waiting)):
        order.add(one, 0)
    for one in draw.sample(waiting, 10):
        order.discard(one)
        waiting.remove(one)
    visited = []
    while len(order):
        one, match = order.next()
        assert match.num_tokens == cache.match(one).num_tokens
        order.start(one)
        cache.started.append(key_of(one))
        visited.append(key_of(one))
    assert sorted(visited, key=repr) == sorted(map(key_of, waiting), key=repr)
    left: set[tuple] = set()
    for before, after in pairwise(visited):
        shared = common_length(before, after) + 1
        left |= {before[:length] for length in range(shared + 1, len(before) + 1)}
        assert not left & {after[:length] for length in range(1, len(after) + 1)}
        assert after != before[: len(after)] or after == before


@pytest.mark.parametrize("seed", range(10))
def test_later_arrivals_take_their_place_among_those_present(seed):
    """Whatever comes and goes, nobody is next while another finds more than a token more (the last of a prompt is
    always computed)."""
    draw = random.Random(seed)
    cache = EndlessCache()
    order = BranchOrder(cache.match)
    waiting: list[Request] = []
    for index in range(150):
        if waiting and draw.random() < 0.45:
            one, match = order.next()
            assert match.num_tokens >= max(cache.match(other).num_tokens for other in waiting) - 1
            order.start(one)
            cache.started.append(key_of(one))
            waiting.remove(one)
        elif waiting and draw.random() < 0.1:
            one = waiting.pop(draw.randrange(len(waiting)))
            order.discard(one)
        else:
            one = random_request(draw, index, waiting)
            order.add(one, cache.match(one).num_tokens)
            waiting.append(one)


def test_a_branch_whose_prefix_was_evicted_waits_for_one_whose_prefix_is_there():
    cached = {"a0": 8, "a1": 8, "b0": 4, "c": 0}
    order = BranchOrder(lambda one: NO_MATCH._replace(num_tokens=cached[one.request_id]))
    requests = {
        "c": request("c", [3] * 9),
        "b0": request("b0", [2] * 9),
        "a0": request("a0", [*[1] * 8, 5]),
        "a1": request("a1", [*[1] * 8, 6]),
    }
    for name, one in requests.items():
        order.add(one, cached[name])
    assert order.next()[0] is requests["a0"]
    cached.update(a0=2, a1=2)
    assert order.next()[0] is requests["b0"]
    cached.update(b0=0)
    assert order.next()[0] is requests["a0"]
    cached.update(a0=0, a1=0)
    assert order.next()[0] is requests["c"], "nothing is cached: the oldest"


def test_a_branch_that_is_being_computed_is_not_left():
    """The second of a branch would find nothing yet, for the first still computes; what another would find is less
    than what the branch will have."""
    cached = {"a0": 0, "a1": 0, "b": 4}
    order = BranchOrder(lambda one: NO_MATCH._replace(num_tokens=cached[one.request_id]))
    first, second = request("a0", [*[1] * 8, 5]), request("a1", [*[1] * 8, 6])
    other = request("b", [2] * 9)
    order.add(first, 0)
    order.add(second, 0)
    first.row = 0
    order.start(first)
    order.add(other, 4)
    assert order.next()[0] is second
    first.row = -1
    assert order.next()[0] is other


class CountedTree:
    """Token comparisons and branches walked in what is called inside."""

    def __enter__(self) -> CountedTree:
        self.num_comparisons = 0
        original = waiting_tree_module._common_depth

        def counted(branch: Branch, tokens: np.ndarray, start: int) -> int:
            end = original(branch, tokens, start)
            self.num_comparisons += min(branch.depth, len(tokens)) - start
            return end

        self._patch = mock.patch.object(waiting_tree_module, "_common_depth", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@pytest.mark.parametrize("num_waiting", [50, 2000])
def test_costs_do_not_grow_with_those_who_wait(num_waiting):
    """Prompts of 38 tokens that share the first. Adding one compares that token and no other; taking all out asks
    the cache once for each, and once more for the first where the claim has to be lowered."""
    num_matches = 0

    def match(one: Request) -> PrefixMatch:
        nonlocal num_matches
        num_matches += 1
        return NO_MATCH._replace(num_tokens=1 if started else 0)

    started: list[Request] = []
    order = BranchOrder(match)
    rng = np.random.default_rng(0)
    with CountedTree() as counted:
        for index in range(num_waiting):
            order.add(request(index, [0, index + 1, *rng.integers(0, 9, 36)]), 0)
        assert counted.num_comparisons <= num_waiting + 37  # the first is split off the second's prompt
        counted.num_comparisons = 0
        while len(order):
            one, _ = order.next()
            order.start(one)
            started.append(one)
        assert counted.num_comparisons == 0
    assert [int(one.request_id) for one in started] == list(range(num_waiting))
    assert num_matches == num_waiting
    assert len(order._claims) <= 2 * 1 + 64 + 1


def test_the_heap_of_claims_does_not_grow_with_those_who_were_there():
    order = BranchOrder(lambda one: NO_MATCH)
    for index in range(3000):
        order.add(request(index, [index, index, index]), 2)
        order.discard(request_to_drop := order.next()[0])
        assert request_to_drop.request_id == str(index)
    assert len(order) == 0
    assert order._tree.num_branches == 0
    assert len(order._claims) <= 65
