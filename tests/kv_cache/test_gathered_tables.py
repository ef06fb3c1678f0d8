"""Tables that are brought up to date where something changed equal tables that are gathered anew."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.gathered_tables import GatheredTables
from lamella.kv_cache.layout import build_layout
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, chunked, full, sliding
from tests.helpers.table_watch import watch_tables

SPECS = [full(), sliding(9), chunked(8)]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_has_the_rows_tables_and_keeps_them(seed):
    """Requests that share prefixes come, go, fail, are preempted and aborted, in little memory."""
    draw = random.Random(seed)
    simulation = Simulation(
        SPECS, page_tokens=draw.choice([1, 4]), max_model_len=90, extra_slabs=draw.choice([4, 30, 200]),
        chunk_tokens=draw.choice([5, 40]), max_num_seqs=6, interval_tokens=draw.choice([None, 7]),
    )  # fmt: skip
    watch_tables(simulation)
    answers = {}
    for index in range(14):
        prompt = [*range(draw.randint(0, 40)), *(draw.randrange(50) for _ in range(draw.randint(1, 3)))]
        answers[f"r{index}"] = foretell(None, prompt, 30)
        simulation.add(f"r{index}", prompt, draw.randint(1, 30))
        for _ in range(draw.randint(0, 9)):
            simulation.step(fail=draw.random() < 0.05)
        running = simulation.scheduler.running
        if running and draw.random() < 0.2:
            simulation.scheduler._preempt(running[-1])
        elif running and draw.random() < 0.2:
            request = simulation.scheduler.rows.request(draw.choice(running))
            simulation.finish(request.request_id)
    simulation.run()
    for name, output in simulation.outputs.items():
        assert output == answers[name][: len(output)]
    assert any(len(output) > 5 for output in simulation.outputs.values())


class TestGather:
    def manager(self, max_blocks=40):
        return BlockManager(
            build_layout([full(), sliding(9)], page_tokens=4), num_slabs=400, num_rows=4,
            max_model_len=4 * max_blocks, interval_tokens=4,
        )  # fmt: skip

    def start(self, manager, row, num_tokens):
        manager.begin(row, manager.match(np.arange(num_tokens, dtype=np.int32) + 1000 * row))
        assert manager.grow(row, 0, num_tokens, is_prefill=True)

    def assert_right(self, manager, tables, rows):
        gathered = tables.gather(np.array(rows))
        for group, (block_tables, first_blocks) in enumerate(gathered):
            assert block_tables.flags.c_contiguous
            assert first_blocks.tolist() == manager.inspect().rows.first_kept[group, rows].tolist()
            for pages, row, first in zip(block_tables.tolist(), rows, first_blocks.tolist(), strict=True):
                own = [page for page in manager.inspect().rows.pages[group, row, first:].tolist() if page != NULL_PAGE]
                assert pages == own + [NULL_PAGE] * (len(pages) - len(own))
        return [block_tables.shape[1] for block_tables, _ in gathered]

    def test_arrays_get_wider_when_a_row_outgrows_them_and_narrower_when_it_is_gone(self):
        """A row of 6 blocks needs 6 columns and gets 8; one of 40 blocks gets 40, the most there is."""
        manager = self.manager()
        tables = GatheredTables(manager.inspect().rows)
        self.start(manager, 0, 24)
        self.start(manager, 1, 60)
        for _ in range(3):
            assert self.assert_right(manager, tables, [0]) == [8, 8]
        for length in range(61, 161):
            assert manager.grow(1, length - 1, 1, is_prefill=False)
            widths = self.assert_right(manager, tables, [1, 0])
            assert -(-length // 4) <= max(widths) <= -(-length // 4) + 8
        for _ in range(3):
            assert self.assert_right(manager, tables, [0]) == [8, 8]

    def test_rows_that_skip_a_step_are_found_again(self):
        """While they were away the arrays were replaced, because another row needed wider ones."""
        manager = self.manager()
        tables = GatheredTables(manager.inspect().rows)
        for row in range(3):
            self.start(manager, row, 12)
        for _ in range(2):
            self.assert_right(manager, tables, [0, 1, 2])
        assert manager.grow(0, 12, 60, is_prefill=True)
        for _ in range(2):
            self.assert_right(manager, tables, [0])
        for _ in range(2):
            self.assert_right(manager, tables, [0, 1, 2])
        for _ in range(2):
            self.assert_right(manager, tables, [2, 0, 1])

    def test_the_next_plan_leaves_this_one_alone(self):
        manager = self.manager()
        tables = GatheredTables(manager.inspect().rows)
        self.start(manager, 0, 8)
        rows = np.array([0])
        for length in range(9, 60):
            [held, _] = [(table.copy(), table) for table, _ in tables.gather(rows)]
            manager.grow(0, length - 1, 1, is_prefill=False)
            tables.gather(rows)
            assert held[0].tolist() == held[1].tolist()

    def test_a_row_that_another_request_took_over(self):
        """The same number of blocks, other pages."""
        manager = self.manager()
        tables = GatheredTables(manager.inspect().rows)
        self.start(manager, 0, 16)
        for _ in range(2):
            self.assert_right(manager, tables, [0])
        manager.release(0, np.arange(16, dtype=np.int32), 16)
        self.start(manager, 1, 3)  # takes pages that row 0 would get otherwise
        self.start(manager, 0, 16)
        for _ in range(2):
            self.assert_right(manager, tables, [0])
