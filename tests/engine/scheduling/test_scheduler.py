"""What every plan keeps to, whoever comes and however little memory there is."""

from __future__ import annotations

import random

import pytest

from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, full, sliding

CHUNK_TOKENS, MAX_NUM_SEQS = 13, 3


@pytest.mark.parametrize("extra_slabs", [0, 3, 400])
@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
@pytest.mark.parametrize("seed", range(3))
def test_plans_stay_within_their_limits_and_the_oldest_always_runs(seed, policy, extra_slabs):
    draw = random.Random(seed)
    simulation = Simulation(
        [full(), sliding(9)], page_tokens=4, chunk_tokens=CHUNK_TOKENS, max_num_seqs=MAX_NUM_SEQS,
        extra_slabs=extra_slabs, scheduling_policy=policy, step_tokens=0,
    )  # fmt: skip
    execute, most_rows = simulation.executor.execute, 0

    def check_and_execute(plan, contexts):
        nonlocal most_rows
        scheduler = simulation.scheduler
        assert 1 <= len(plan.token_ids) <= CHUNK_TOKENS
        scheduled = scheduler.scheduled_rows.tolist()
        assert len(set(scheduled)) == len(scheduled) <= MAX_NUM_SEQS
        # By when they first ran: it is never preempted, so it gets on in each step.
        unfinished = [one for one in simulation.requests.values() if one.admission_index >= 0 and not one.is_finished]
        assert min(unfinished, key=lambda one: one.admission_index).row in scheduled
        most_rows = max(most_rows, len(scheduled))
        return execute(plan, contexts)

    simulation.executor.execute = check_and_execute
    prompts = {f"r{index}": [draw.randrange(3) for _ in range(draw.randint(1, 30))] for index in range(12)}
    lengths = {name: draw.randint(1, 15) for name in prompts}
    for name, prompt in prompts.items():
        simulation.add(name, prompt, lengths[name])
        if draw.random() < 0.5:
            simulation.step()
    simulation.run()
    for name, prompt in prompts.items():
        assert simulation.outputs[name] == foretell(None, prompt, lengths[name])
    assert most_rows > 1
