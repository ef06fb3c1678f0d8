"""The order in which waiting requests are admitted."""

from __future__ import annotations

import pytest

from lamella.engine.waiting_queue import MAX_WAIT_STEPS, WaitingQueue
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


def test_nobody_is_overtaken_for_ever():
    simulation = Simulation(HYBRID, page_tokens=4)
    simulation.add("warm", range(20), 1)
    simulation.run()
    queue = WaitingQueue(simulation.manager, "prefix")
    old = simulation.add("old", [45] * 20, 1)
    hit = simulation.add("hit", range(20), 1)
    queue.add(old, 100)
    queue.add(hit, 101)
    queue.new_round()
    assert queue.next(100 + MAX_WAIT_STEPS - 1) is hit
    assert queue.next(100 + MAX_WAIT_STEPS) is old


def test_a_preempted_request_comes_first_again():
    simulation = Simulation(HYBRID, page_tokens=4)
    queue = WaitingQueue(simulation.manager, "fcfs")
    first, second = simulation.add("first", range(5), 1), simulation.add("second", range(5), 1)
    queue.add(second, 0)
    queue.add_first(first, 3)
    assert queue.next(3) is first
    queue.discard(first)
    assert queue.next(3) is second
    queue.discard(second)
    assert not queue


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="scheduling_policy='sjf'"):
        WaitingQueue(Simulation(HYBRID).manager, "sjf")
