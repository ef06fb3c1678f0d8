"""The order in which waiting requests are admitted."""

from __future__ import annotations

import pytest

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.waiting_order import MAX_WAIT_STEPS
from lamella.engine.scheduling.waiting_queue import WaitingQueue
from lamella.errors import ConfigError
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9)]


def admission_order(simulation) -> list[str]:
    order: list[str] = []
    while simulation.scheduler.has_requests:
        simulation.step()
        running = [simulation.scheduler.rows.request(row).request_id for row in simulation.scheduler.running]
        order += [name for name in running if name not in order]
        order += [name for name, request in simulation.requests.items() if request.is_finished and name not in order]
    return order


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", ["a", "b", "c", "d"]), ("prefix", ["c", "d", "a", "b"])])
def test_the_longest_cached_prefix_goes_first(policy, expected):
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=1, scheduling_policy=policy)
    simulation.add("warm", range(40), 4)
    simulation.run()
    simulation.outputs.pop("warm")
    simulation.requests.pop("warm")
    prompts = {"a": [45] * 20, "b": [46] * 20, "c": [*range(40), 41], "d": [*range(39), 42]}
    for name, prompt in prompts.items():
        simulation.add(name, prompt, 3)
    assert admission_order(simulation) == expected
    for name, prompt in prompts.items():
        assert simulation.outputs[name] == foretell(None, prompt, 3)


def waiting(queue: WaitingQueue, step: int) -> Request:
    return queue.next(step)[0]


def warm_queue(policy: str = "prefix") -> tuple[Simulation, WaitingQueue]:
    """20 tokens are cached."""
    simulation = Simulation(HYBRID, page_tokens=4)
    simulation.add("warm", range(20), 1)
    simulation.run()
    return simulation, WaitingQueue(simulation.manager, policy)


def test_later_arrivals_overtake_for_so_many_steps_and_no_longer():
    simulation, queue = warm_queue()
    old = simulation.add("old", [45] * 20, 1)
    hit = simulation.add("hit", range(20), 1)
    queue.add(old, 100)
    queue.add(hit, 101)
    assert waiting(queue, 100 + MAX_WAIT_STEPS - 1) is hit
    assert waiting(queue, 100 + MAX_WAIT_STEPS) is old
    later = simulation.add("later", range(20), 1)
    queue.add(later, 100 + MAX_WAIT_STEPS)
    assert waiting(queue, 100 + MAX_WAIT_STEPS) is old
    queue.start(old)
    assert waiting(queue, 100 + MAX_WAIT_STEPS) is hit


def test_those_of_one_age_are_never_overdue_for_each_other():
    """Of two that came together, the one whose prefix is cached is next however long they wait, also once a later
    one is there; that one is the last."""
    simulation, queue = warm_queue()
    old = simulation.add("old", [45] * 20, 1)
    hit = simulation.add("hit", range(20), 1)
    later = simulation.add("later", [*range(20), 47], 1)
    queue.add(old, 100)
    queue.add(hit, 100)
    assert waiting(queue, 100 + 10 * MAX_WAIT_STEPS) is hit
    queue.add(later, 100 + 10 * MAX_WAIT_STEPS)
    order = []
    while queue:
        order.append(waiting(queue, 100 + 10 * MAX_WAIT_STEPS))
        queue.start(order[-1])
    assert order == [hit, old, later]


def test_an_overdue_request_can_be_taken_out():
    simulation, queue = warm_queue()
    old = simulation.add("old", [45] * 20, 1)
    hit = simulation.add("hit", range(20), 1)
    queue.add(old, 0)
    queue.add(hit, 1)
    assert waiting(queue, MAX_WAIT_STEPS) is old
    queue.discard(old)
    assert list(queue) == [hit]
    assert waiting(queue, MAX_WAIT_STEPS) is hit


@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
def test_a_preempted_request_comes_first_again(policy):
    simulation = Simulation(HYBRID, page_tokens=4)
    queue = WaitingQueue(simulation.manager, policy)
    first, second, third = (simulation.add(name, range(5), 1) for name in ("first", "second", "third"))
    queue.add(third, 0)
    queue.add_first(second, 3)
    queue.add_first(first, 3)
    assert list(queue) == [first, second, third]
    for request in (first, second, third):
        assert waiting(queue, 3) is request
        queue.discard(request)
    assert not queue


def test_who_finds_more_overtakes_a_preempted_request_for_so_many_steps_and_no_longer():
    """The one that has waited longest counts, not the one that is first."""
    simulation, queue = warm_queue()
    once, twice = simulation.add("once", [45] * 20, 1), simulation.add("twice", [46] * 20, 1)
    hit = simulation.add("hit", range(20), 1)
    queue.add(hit, 0)
    queue.add_first(once, 10)
    queue.add_first(twice, 1000)
    assert waiting(queue, 10 + MAX_WAIT_STEPS - 1) is hit
    assert waiting(queue, 10 + MAX_WAIT_STEPS) is twice
    queue.start(twice)
    assert waiting(queue, 10 + MAX_WAIT_STEPS) is once


def test_an_overdue_request_comes_before_one_that_was_preempted_a_moment_ago():
    simulation, queue = warm_queue()
    old, later = simulation.add("old", [45] * 20, 1), simulation.add("later", range(20), 1)
    preempted = simulation.add("preempted", [46] * 20, 1)
    queue.add(old, 0)
    queue.add(later, 1)
    queue.add_first(preempted, MAX_WAIT_STEPS)
    assert waiting(queue, MAX_WAIT_STEPS) is old
    assert waiting(queue, 2 * MAX_WAIT_STEPS) is preempted


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="scheduling_policy='sjf'"):
        WaitingQueue(Simulation(HYBRID).manager, "sjf")
