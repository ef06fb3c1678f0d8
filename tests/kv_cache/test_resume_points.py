"""The order of eviction, against a model that looks at every resume point; and that the cache's costs do not grow with
the number of prompts."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.resume_points import ResumePoints
from lamella.kv_cache.sibling_trie import NO_NODE
from lamella.kv_cache.spec import KVCacheSpec
from tests.helpers.calls import num_calls
from tests.helpers.simulation import Simulation, commit_row, full, sliding


class Model:
    """All resume points, least recently used first, and all expectations, oldest first."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, list] = OrderedDict()
        self.expectations: list[Expectation] = []
        self.favoured: set[int] = set()
        self.kept: set[int] = set()  # nodes that something but a resume point keeps
        self.used: set[tuple[int, int]] = set()  # pages

    def by_worth(self) -> list[int]:
        expected = list(dict.fromkeys(one.node for one in self.expectations))
        soonest = {node: min(one.rank for one in self.expectations if one.node == node) for node in expected}
        rest = [node for node in self.held if node not in soonest]
        rest.sort(key=lambda node: node in self.favoured)
        return rest + sorted(expected, key=lambda node: -soonest[node])

    def first(self) -> int:
        keeping = (
            node for node in self.by_worth() if node not in self.kept or not self.used.issuperset(self.held[node])
        )
        return next(keeping, NO_NODE)

    def first_with_windows(self) -> int:
        return next((node for node in self.by_worth() if not self.used.issuperset(self.held[node])), NO_NODE)


PAGES = [(group, node) for group in range(2) for node in range(6)]


@pytest.mark.parametrize("seed", range(40))
def test_the_first_to_go_is_the_one_that_a_look_at_all_finds(seed):
    draw = random.Random(seed)
    points, model = ResumePoints(), Model()

    def first(next_one, keeps_memory, set_aside):
        while (node := next_one()) != NO_NODE and not keeps_memory(node):
            set_aside(node)
        return node

    def has_unused(node):
        return not model.used.issuperset(points.held(node))

    for _ in range(250):
        action, node, page = draw.random(), draw.randrange(8), draw.choice(PAGES)
        if node not in model.held:
            model.held[node] = draw.sample(PAGES, draw.randint(0, 3))
            points.put(node, model.held[node])
        elif action < 0.1:
            model.expectations = [one for one in model.expectations if one.node != node]
            model.favoured.discard(node)
            assert points.pop(node) == model.held.pop(node)
        elif action < 0.15:
            assert points.strip(node) == model.held[node]
            model.held[node] = []
        elif action < 0.3:
            points.touch(node)
            model.held.move_to_end(node)
        elif action < 0.35 and seed % 4 < 2:
            points.favour(node)
            model.favoured.add(node)
            model.held.move_to_end(node)
        elif action < 0.4:
            points.pass_by(node)
            if node not in model.favoured:
                model.held.move_to_end(node, last=False)
        elif action < 0.55:
            one = Expectation(node, draw.randrange(6), 0, 0)
            model.expectations.append(one)
            points.expect(one)
        elif action < 0.7 and model.expectations:
            one = draw.choice(model.expectations)
            if draw.random() < 0.5:
                points.rerank(one, draw.randrange(6))
            else:
                model.expectations.remove(one)
                points.withdraw(one)
        elif action < 0.85:
            model.kept ^= {node}
            if node not in model.kept:
                points.note_unused(node)
        else:
            model.used ^= {page}
            if page not in model.used:
                points.note_unused_page(page)
        assert list(points) == list(model.held)
        if draw.random() < 0.6:
            keeps_memory = lambda node: node not in model.kept or has_unused(node)  # noqa: E731
            assert first(points.first, keeps_memory, points.set_aside) == model.first()
        if seed % 2 and draw.random() < 0.6:
            found = first(points.first_with_windows, has_unused, points.set_windows_aside)
            assert found == model.first_with_windows()


def warm(num_prompts: int, specs: list[KVCacheSpec], *, num_shared: int) -> tuple[Simulation, list[np.ndarray]]:
    """A cache of so many prompts of 10 tokens, the first ones the same in all; and four prompts like them."""
    prompts = [
        [7] * num_shared + [index // 50, index % 50] + [9] * (8 - num_shared) for index in range(num_prompts + 4)
    ]
    simulation = Simulation(specs, page_tokens=8, extra_slabs=12 * num_prompts + 100, chunk_tokens=64, max_num_seqs=1)
    manager = simulation.manager
    arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    for tokens in arrays[:num_prompts]:
        serve(manager, tokens)
    return simulation, arrays[num_prompts:]


def serve(manager, tokens: np.ndarray) -> None:
    assert manager.begin(0, manager.match(tokens))
    computed = manager.inspect().rows.num_blocks[0] * manager.layout.page_tokens
    assert manager.grow(0, int(computed), len(tokens) - int(computed), is_prefill=True)
    manager.end_step()
    commit_row(manager, 0, tokens, len(tokens), ends_prompt=True)
    manager.release(0, tokens, len(tokens))


@pytest.mark.parametrize("num_shared", [1, 7])
@pytest.mark.parametrize("specs", [[full()], [full(), sliding(4)], [sliding(4)]], ids=["full", "hybrid", "sliding"])
def test_a_prompt_costs_the_same_beside_many_siblings(specs, num_shared):
    """Match, copy, insert, commit, release, expect, change a rank, withdraw and evict."""
    costs = []
    for num_prompts in (100, 1000):
        simulation, (first, second, third, fourth) = warm(num_prompts, specs, num_shared=num_shared)
        manager = simulation.manager
        assert len(manager.inspect().tree.resume_points) >= num_prompts

        def use(manager=manager, prompts=(first, second, third, fourth)):
            assert manager.match(prompts[0]).num_tokens == num_shared
            for tokens in prompts[:2]:
                serve(manager, tokens)
            longer = np.append(prompts[0], np.int32(3))
            expectation = manager.expect(longer, None, 5)
            manager.rerank(expectation, 2)
            for _ in range(20):
                assert manager.inspect().tree.evict_one()
            manager.withdraw(expectation)

        costs.append(num_calls(use))
    assert costs[1] < 1.3 * costs[0]


def test_an_eviction_costs_the_same_where_many_requests_wait():
    """Each expects a prefix of its own. The one whose request runs last goes first, and is found without a look at the
    others."""
    costs = []
    for num_prompts in (100, 1000):
        simulation, _ = warm(num_prompts, [full(), sliding(4)], num_shared=1)
        manager = simulation.manager
        waiting = []
        for index in range(num_prompts):
            prompt = np.array([7, index // 50, index % 50] + [9] * 7 + [3], dtype=np.int32)
            waiting.append(manager.expect(prompt, None, index))
        assert len(manager.inspect().tree.expected) == num_prompts
        while len(manager.inspect().tree.resume_points) > num_prompts:
            assert manager.inspect().tree.evict_one()

        def use(manager=manager, waiting=waiting):
            for _ in range(20):
                assert manager.inspect().tree.evict_one()
            manager.rerank(waiting[3], -1)
            manager.withdraw(waiting[4])

        costs.append(num_calls(use))
        assert [one.is_live for one in waiting] == [
            index != 4 and index < num_prompts - 20 for index in range(num_prompts)
        ]
    assert costs[1] < 1.3 * costs[0]


@pytest.mark.parametrize("specs", [[full()], [full(), sliding(4)]], ids=["full", "hybrid"])
def test_resume_points_that_free_nothing_are_looked_at_once(specs):
    """Many conversations of several turns, of which the earlier ones were passed and so are the first to go. Once their
    windows are gone, or where there are none, letting them go frees nothing."""
    costs = []
    for num_prompts in (50, 1000):
        simulation, _ = warm(num_prompts, specs, num_shared=1)
        tree = simulation.manager.inspect().tree
        for node in list(tree.resume_points):
            parent = int(tree.parent[node])
            if int(tree.end[node]) == 10 and parent not in tree.resume_points:
                tree.add_resume_point(parent, [])
        for node in list(tree.resume_points):
            if tree.num_children[node]:
                tree._let_go(tree.resume_points.strip(node))
                tree.resume_points.pass_by(node)
        assert tree.evict_one()
        costs.append(num_calls(lambda tree=tree: [tree.evict_one() for _ in range(10)]))
    assert costs[1] < 1.5 * costs[0]
