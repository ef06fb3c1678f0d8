"""What waiting requests count on: how long it stays, and who forgets it when."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.engine.scheduling.waiting_queue import WaitingQueue
from lamella.kv_cache import invariants
from lamella.kv_cache.expectations import Expectation, Expectations
from tests.helpers.serving import run_all, serve
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9), sliding(9)]  # pages of 4 tokens: 16 bytes of full attention, 32 of the windows
PROMPTS = {name: [first, *range(19)] for first, name in enumerate("abcd", start=30)}


def warm(names: str = "abcd", **options) -> Simulation:
    """One resume point for each name, at 20 tokens; the first is the oldest."""
    simulation = Simulation(HYBRID, page_tokens=4, **options)
    for name in names:
        serve(simulation, PROMPTS[name])
    return simulation


def longer(name: str) -> np.ndarray:
    return np.array([*PROMPTS[name], 47], dtype=np.int32)


def order_of_eviction(simulation: Simulation, names: str = "abcd") -> str:
    """Evict all; which prompt was lost when."""
    order = ""
    while simulation.manager.inspect().tree.evict_one():
        invariants.check(simulation.manager)
        lost = [name for name in names if not simulation.manager.match(longer(name)).num_tokens]
        order += "".join(name for name in lost if name not in order)
    return order


def test_nobody_waits_and_the_least_recently_used_goes_first():
    assert order_of_eviction(warm()) == "abcd"


def test_what_is_expected_goes_last_and_of_that_what_is_needed_first():
    simulation = warm()
    expectations = {name: simulation.manager.expect(longer(name), None, rank) for name, rank in (("a", 1), ("b", 2))}
    assert order_of_eviction(simulation) == "cdba"
    assert not any(one.is_live for one in expectations.values())


def test_the_soonest_of_those_who_expect_a_prefix_counts():
    """B is needed by ranks 9 and 1, A by 5 and C by 3."""
    simulation = warm()
    for name, rank in (("b", 9), ("a", 5), ("c", 3), ("b", 1)):
        simulation.manager.expect(longer(name), None, rank)
    assert order_of_eviction(simulation) == "dacb"


def test_who_waits_no_more_keeps_nothing():
    """Once both requests for A have withdrawn, A is as old as when it was expected: it was used after the others."""
    simulation = warm()
    manager = simulation.manager
    first, second = manager.expect(longer("a"), None, 1), manager.expect(longer("a"), None, 2)
    manager.expect(longer("b"), None, 3)
    manager.withdraw(first)
    assert (manager.inspect().tree.expected.num_requests, len(manager.inspect().tree.expected)) == (2, 2)
    manager.withdraw(second)
    manager.withdraw(second)
    assert (manager.inspect().tree.expected.num_requests, len(manager.inspect().tree.expected)) == (1, 1)
    assert not first.is_live
    assert order_of_eviction(simulation) == "cdab"


def test_an_evicted_prefix_is_expected_no_more():
    simulation = warm("a")
    manager = simulation.manager
    expectation = manager.expect(longer("a"), None, 1)
    assert expectation.is_live
    assert manager.inspect().tree.evict_one()
    assert not expectation.is_live
    expected = manager.inspect().tree.expected
    assert (len(expected), expected.num_requests, expected.num_tokens, expected.num_bytes) == (0, 0, 0, 0)
    manager.withdraw(expectation)
    assert expected.num_requests == 0


def test_what_is_cached_for_one_alone_is_counted_once():
    """20 tokens: 5 full pages of 16 bytes, and the window from token 12 on, 2 pages of 32 bytes."""
    simulation = warm("ab")
    manager, expected = simulation.manager, simulation.manager.inspect().tree.expected
    manager.expect(longer("a"), None, 1)
    assert (expected.num_requests, expected.num_tokens, expected.num_bytes) == (1, 20, 144)
    again = manager.expect(longer("a"), None, 2)
    assert (len(expected), expected.num_requests, expected.num_tokens, expected.num_bytes) == (1, 2, 20, 144)
    assert expected.num_bytes_at(again.node) == 144
    manager.expect(longer("b"), None, 3)
    assert (len(expected), expected.num_requests, expected.num_tokens, expected.num_bytes) == (2, 3, 40, 288)
    assert manager.expect(np.arange(20, dtype=np.int32), None, 4) is None
    assert expected.num_requests == 3


def test_what_is_shared_is_not_counted():
    """Another prompt goes on from the first 8 tokens: of 5 full pages 3 are left. Then a running request has 4."""
    simulation = warm("a")
    manager = simulation.manager
    serve(simulation, [*PROMPTS["a"][:8], *[44] * 12])
    request = simulation.add("running", [*PROMPTS["a"][:18], 45, 46], 30)
    expectation = simulation.scheduler.queue._expectations[request]
    assert (expectation.num_tokens, expectation.num_bytes) == (18, 3 * 16 + 3 * 32)
    simulation.step()
    simulation.step()
    assert request.num_cached_tokens == 18
    assert manager.expect(longer("a"), None, 2).num_bytes == 1 * 16 + 2 * 32


def test_a_prefix_that_ends_inside_a_block_is_expected_with_its_block():
    """18 tokens: 5 full pages; the window from token 10 on meets 3 blocks."""
    simulation = warm("a")
    prompt = np.array([*PROMPTS["a"][:18], 45, 46], dtype=np.int32)
    expectation = simulation.manager.expect(prompt, None, 1)
    assert (expectation.num_tokens, expectation.num_bytes) == (18, 5 * 16 + 3 * 32)
    simulation.manager.inspect().tree.evict_one()
    assert not expectation.is_live


def test_blocks_that_a_step_has_yet_to_compute_are_not_expected():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=64)
    simulation.add("first", PROMPTS["a"], 5)
    simulation.scheduler.schedule()
    assert simulation.manager.match(longer("a")).num_tokens == 20, "a request of the same step may share them"
    assert simulation.manager.expect(longer("a"), None, 1) is None
    simulation.scheduler.roll_back()
    simulation.step()
    assert simulation.manager.expect(longer("a"), None, 1).num_tokens == 20


@pytest.mark.parametrize("end", ["admitted", "aborted"])
def test_a_request_that_leaves_the_queue_expects_nothing(end):
    simulation = warm("ab", max_num_seqs=1)
    expected = simulation.manager.inspect().tree.expected
    simulation.add("running", [1, 2, 3], 8)
    simulation.step()
    simulation.add("waiting", longer("a").tolist(), 2)
    assert (expected.num_requests, expected.num_tokens) == (1, 20)
    if end == "aborted":
        simulation.finish("waiting")
    while simulation.scheduler.queue:
        assert expected.num_requests == 1
        simulation.step()
    assert (len(expected), expected.num_requests, expected.num_tokens, expected.num_bytes) == (0, 0, 0, 0)
    assert order_of_eviction(simulation, "ab")[0] == "b", "it was used after B"


def test_a_preempted_request_expects_what_it_left_behind_before_all_others():
    simulation = warm("ab", max_num_seqs=1)
    request = simulation.add("running", longer("a").tolist(), 9)
    for _ in range(4):
        simulation.step()
    simulation.add("waiting", longer("b").tolist(), 2)
    scheduler, expected = simulation.scheduler, simulation.manager.inspect().tree.expected
    scheduler.queue.expect_first(scheduler._preempt(request.row))
    invariants.check(simulation.manager)
    assert (expected.num_requests, len(expected)) == (2, 2)
    assert expected.num_tokens == 20 + 24, "B's prompt, and 21 tokens with 3 of the answer computed"
    first_needed = max(expected, key=expected.turn)
    assert simulation.manager.inspect().tree.end[first_needed] == 24
    run_all(simulation)
    assert expected.num_requests == 0


def test_a_failed_step_lets_its_requests_expect_what_is_computed():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=8)
    simulation.add("r", PROMPTS["a"], 3)
    simulation.step()
    simulation.step(fail=True)
    expected = simulation.manager.inspect().tree.expected
    assert (expected.num_requests, expected.num_tokens) == (1, 8)
    run_all(simulation)
    assert expected.num_requests == 0


def test_with_the_prefix_policy_the_longest_runs_first():
    """A's request came first, but B's has more cached and will run sooner: C, which nobody expects, goes first."""
    for policy, order in (("fcfs", "cba"), ("prefix", "cab")):
        simulation = warm("bca")
        queue = WaitingQueue(simulation.manager, policy)
        for index, prompt in enumerate(([*PROMPTS["a"][:18], 45, 46], longer("b"))):
            request = simulation.add(f"{policy}{index}", prompt, 1)
            simulation.scheduler.queue.discard(request)
            queue.add(request, 0)
        assert order_of_eviction(simulation, "abc") == order


def test_the_prefix_of_a_waiting_request_outlives_what_a_running_one_needs():
    """Room for a running request of 60 tokens and few cached ones: the waiting request's stays, though the oldest."""
    hits = []
    for waits in (False, True):
        simulation = Simulation([full(), sliding(9)], page_tokens=4, max_num_seqs=1, extra_slabs=20)
        serve(simulation, PROMPTS["a"])
        serve(simulation, PROMPTS["b"])
        serve(simulation, PROMPTS["c"])
        simulation.add("running", [*range(40, 50), *range(5)], 45)
        simulation.step()
        if waits:
            simulation.add("waiting", longer("a").tolist(), 1)
        while simulation.scheduler.running and not simulation.requests["running"].is_finished:
            simulation.step()
        if not waits:
            serve(simulation, [41, *range(40)])
            simulation.add("waiting", longer("a").tolist(), 1)
        run_all(simulation)
        hits.append(simulation.requests["waiting"].num_cached_tokens)
    assert hits == [0, 20]


class _Model:
    """Every expectation that was added and neither withdrawn nor disappointed."""

    def __init__(self) -> None:
        self.live: list[Expectation] = []

    def sums(self) -> tuple[int, int, int, int]:
        nodes = {one.node: one for one in self.live}
        return (
            len(nodes), len(self.live), sum(one.num_tokens for one in nodes.values()),
            sum(one.num_bytes for one in nodes.values()),
        )  # fmt: skip

    def ranks(self) -> list[int]:
        nodes = {one.node for one in self.live}
        return sorted((min(one.rank for one in self.live if one.node == node) for node in nodes), reverse=True)


def test_sums_and_order_follow_a_model():
    draw = random.Random(0)
    expectations, model, every = Expectations(), _Model(), []
    for _ in range(3000):
        action = draw.random()
        if action < 0.5:
            node = draw.randrange(12)
            one = Expectation(node, draw.randrange(50), 10 * node, 100 * node)
            expectations.add(one)
            model.live.append(one)
            every.append(one)
        elif action < 0.7 and every:
            expectations.rerank(draw.choice(every), draw.randrange(50))
        elif action < 0.85 and every:
            one = draw.choice(every)
            expectations.withdraw(one)
            model.live = [other for other in model.live if other is not one]
        else:
            node = draw.randrange(12)
            expectations.disappoint(node)
            model.live = [other for other in model.live if other.node != node]
        found = (len(expectations), expectations.num_requests, expectations.num_tokens, expectations.num_bytes)
        assert found == model.sums()
        order = sorted(expectations, key=expectations.turn)
        assert [min(one.rank for one in model.live if one.node == node) for node in order] == model.ranks()
        assert all(one.is_live == any(one is other for other in model.live) for one in every)
