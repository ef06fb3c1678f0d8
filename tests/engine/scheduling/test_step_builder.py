"""A plan's arrays against lists that are made token by token from the requests."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.helpers.simulation import Simulation, chunked, full, sliding

PAGE_TOKENS = 4


def lists_of(plan, rows, scheduled):
    """What must be in the plan: each request's next tokens, at their positions, at the ends of its pages."""
    token_ids, positions, starts, slots = [], [], [0], [[] for _ in plan.groups]
    for index, row in enumerate(scheduled):
        first, stop = int(rows.num_computed[row]), int(plan.seq_lens[index])
        starts.append(starts[-1] + stop - first)
        for position in range(first, stop):
            token_ids.append(int(rows.tokens[row, position]))
            positions.append(position)
            for group, of_group in zip(plan.groups, slots, strict=True):
                block = position // PAGE_TOKENS - int(group.first_blocks[index])
                of_group.append(int(group.block_tables[index, block]) * PAGE_TOKENS + position % PAGE_TOKENS)
    return token_ids, positions, starts, slots


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_lists_the_next_tokens_of_its_requests(seed):
    draw = random.Random(seed)
    simulation = Simulation(
        [full(), sliding(9), chunked(8)], page_tokens=PAGE_TOKENS, chunk_tokens=11, max_num_seqs=4, extra_slabs=400,
        windowed_replay=False,
    )  # fmt: skip
    execute, kinds = simulation.executor.execute, set()

    def check_and_execute(plan, contexts):
        rows, scheduled = simulation.scheduler.rows, simulation.scheduler.scheduled_rows.tolist()
        token_ids, positions, starts, slots = lists_of(plan, rows, scheduled)
        assert plan.token_ids.tolist() == token_ids
        assert plan.positions.tolist() == positions
        assert plan.query_start.tolist() == starts
        for group, of_group in zip(plan.groups, slots, strict=True):
            assert group.slot_mapping.tolist() == of_group
        num_new = [stop - start for start, stop in pairwise(starts)]
        assert num_new[: plan.num_decodes] == [1] * plan.num_decodes
        assert all(num > 1 for num in num_new[plan.num_decodes :])
        complete = [
            index for index, row in enumerate(scheduled) if int(plan.seq_lens[index]) == int(rows.num_tokens[row])
        ]
        assert plan.sample_requests.tolist() == complete
        assert plan.sampled_tokens.tolist() == [starts[index + 1] - 1 for index in complete]
        kinds.add((plan.num_decodes > 0, plan.num_decodes < len(scheduled)))
        return execute(plan, contexts)

    simulation.executor.execute = check_and_execute
    for index in range(6):
        simulation.add(f"r{index}", [draw.randrange(50) for _ in range(draw.randint(1, 30))], draw.randint(1, 12))
        simulation.step()
    simulation.run()
    assert kinds == {(True, False), (False, True), (True, True)}, "decodes alone, prefills alone and both were built"
