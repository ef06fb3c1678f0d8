"""The tests of steps in flight are tested: with any one rule broken, a fixed battery of random lives fails."""

from __future__ import annotations

import random

import pytest

from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.planted_faults.async_scheduling import ASYNC_FAULTS
from tests.helpers.planted_faults.battery import LAYERS, NOTICED, drain
from tests.helpers.simulation import full, sliding

MAX_MODEL_LEN = 60
SEEDS = range(40)


def life(seed: int) -> LateSimulation:
    """A random model, and random requests: some share prefixes, some are twins, some end by a stop token or are
    aborted; some steps fail."""
    draw = random.Random(seed)
    specs = [draw.choice(LAYERS) for _ in range(draw.randint(1, 3))]
    if seed % 4 == 0:  # pages of two sizes, several to a slab, so that slabs move
        specs = [full(draw.randint(1, 2)), sliding(9, 3)]
    simulation = LateSimulation(
        specs,
        page_tokens=draw.choice([1, 2, 4]),
        max_model_len=MAX_MODEL_LEN,
        extra_slabs=draw.choice([0, 3, 12, 200]),
        chunk_tokens=draw.choice([6, 40]),
        max_num_seqs=draw.choice([2, 4]),
        interval_tokens=draw.choice([None, 6]),
        scheduling_policy=draw.choice(["fcfs", "prefix"]),
        retention=RetentionPolicy(*draw.choice([("tails", None, False), ("tails",), ("all",)])),
        step_tokens=draw.choice([0, 40]),
        never_idle=draw.random() < 0.3,
    )
    expected = {}
    for _ in range(8):
        base = draw.choice([7, 11])
        prompt = [(base * position) % 50 for position in range(draw.randint(1, 30))]
        if expected and draw.random() < 0.3:  # a next turn
            earlier, answer = expected[draw.choice(list(expected))]
            prompt = [*earlier, *answer, 9][: MAX_MODEL_LEN - 22]
        num_tokens = draw.randint(1, 20)
        answer = foretell(None, prompt, num_tokens)
        stop = draw.choice(answer) if draw.random() < 0.5 else None
        if stop is not None:
            answer = answer[: answer.index(stop) + 1]
        for _ in range(draw.choice([1, 1, 2])):
            request_id = f"r{len(expected)}"
            simulation.add(request_id, prompt, num_tokens, stop_token_ids=[] if stop is None else [stop])
            expected[request_id] = prompt, answer
        for _ in range(draw.randint(0, 7)):
            simulation.step(fail=draw.random() < 0.05, fail_at=draw.choice(["result", "launch"]))
        running = [name for name, one in simulation.requests.items() if not one.is_finished]
        if running and draw.random() < 0.2:
            simulation.finish(draw.choice(running))
    simulation.run()
    for request_id, (_, answer) in expected.items():
        is_aborted = simulation.requests[request_id].finish_reason == "abort"
        outputs = simulation.outputs[request_id]
        assert outputs == (answer[: len(outputs)] if is_aborted else answer)
    drain(simulation)
    return simulation


def battery() -> list[LateSimulation]:
    return [life(seed) for seed in SEEDS]


def test_the_battery_passes_with_no_fault_and_plans_ahead():
    lives = battery()
    num_steps = sum(simulation.scheduler.counters().num_steps for simulation in lives)
    assert sum(simulation.num_ahead for simulation in lives) > num_steps / 3
    assert sum(simulation.num_discarded for simulation in lives) > 20
    assert sum(simulation.scheduler.counters().num_preemptions for simulation in lives) > 20
    assert sum(simulation.manager.inspect().supply.num_slab_moves for simulation in lives) > 5


@pytest.mark.parametrize("fault", ASYNC_FAULTS)
def test_a_planted_fault_is_noticed(fault):
    with ASYNC_FAULTS[fault](), pytest.raises(NOTICED):
        battery()
