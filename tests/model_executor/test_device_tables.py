"""The device's block tables hold what the block manager's do, whatever happened between steps, and little is sent."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lamella.kv_cache import table_changes
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.step_memory import TableVersions
from lamella.model_executor import device_tables, step_buffers
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.step_buffers import StepUpload, send_step
from tests.helpers.device_plans import random_plan
from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.simulation import Simulation, chunked, full, sliding

CPU = torch.device("cpu")
SPECS = [full(), sliding(9), chunked(8)]


class Device:
    """Launches every plan that a simulation makes and holds the tables against the manager's, entry by entry.

    sent: entries that each step brought. A launch may fail before, while or after its changes are written, with no more
    of them written than a part.
    """

    def __init__(self, simulation: Simulation, draw: random.Random, *, failing_share: float = 0.0) -> None:
        self.simulation, self.draw, self.failing_share = simulation, draw, failing_share
        self.tables = DeviceTables(CPU, simulation.manager.layout)
        self.upload = StepUpload(CPU)
        self.sent: list[int] = []
        self.num_failed = 0
        self._schedule = simulation.scheduler.schedule
        simulation.scheduler.schedule = self.schedule

    def schedule(self):
        plan = self._schedule()
        if plan is None:
            return None
        if self.draw.random() < self.failing_share:
            self._launch_and_fail(plan)
        if self.draw.random() < 0.9:  # else the plan is never launched
            _, shape = send_step(self.upload, self.tables, plan)
            self.sent.append(shape.num_changes)
            self.check(plan)
        return plan

    def _launch_and_fail(self, plan) -> None:
        self.num_failed += 1
        changes = self.tables.changes(plan)
        count = self.draw.randint(0, len(changes.places))
        self.tables.entries[torch.from_numpy(changes.places[:count])] = torch.from_numpy(changes.pages[:count])

    def check(self, plan) -> None:
        rows, page_tokens = self.simulation.manager.inspect().rows, self.simulation.manager.layout.page_tokens
        planned = self.simulation.scheduler._scheduled.tolist()
        assert plan.tables.rows.tolist() == planned
        for group, table in enumerate(self.tables.tables):
            for row, seq_len in zip(planned, plan.seq_lens.tolist(), strict=True):
                for block in range(int(rows.first_kept[group, row]), -(-seq_len // page_tokens)):
                    entry = int(table[row, block % table.shape[1]])
                    assert entry == int(rows.pages[group, row, block]) != NULL_PAGE, (group, row, block)


@pytest.mark.parametrize("kind", [Simulation, LateSimulation])
@pytest.mark.parametrize("seed", range(6))
def test_tables_follow_whatever_happens(kind, seed):
    """Requests that share prefixes come, go, fail, are preempted and aborted, in little memory, with a step in flight
    and without."""
    draw = random.Random(seed)
    simulation = kind(
        SPECS, page_tokens=draw.choice([1, 4]), max_model_len=90, extra_slabs=draw.choice([4, 30, 200]),
        chunk_tokens=draw.choice([5, 40]), max_num_seqs=6, interval_tokens=draw.choice([None, 7]),
    )  # fmt: skip
    device = Device(simulation, draw, failing_share=0.05)
    answers = {}
    for index in range(14):
        prompt = [*range(draw.randint(0, 40)), *(draw.randrange(50) for _ in range(draw.randint(1, 3)))]
        answers[f"r{index}"] = foretell(None, prompt, 30)
        simulation.add(f"r{index}", prompt, draw.randint(1, 30))
        for _ in range(draw.randint(0, 9)):
            simulation.step(fail=draw.random() < 0.05)
        running = simulation.scheduler.running
        if kind is Simulation and running and draw.random() < 0.2:
            simulation.scheduler._preempt(running[-1])
        elif running and draw.random() < 0.2:
            request = simulation.scheduler.rows.request(draw.choice(running))
            simulation.finish(request.request_id)
    simulation.run()
    for name, output in simulation.outputs.items():
        assert output == answers[name][: len(output)]
    assert device.num_failed > 0
    assert len(device.sent) > 20
    assert sum(device.sent) > 20


def test_steady_decode_sends_the_blocks_that_rows_gain_and_nothing_else():
    """Three rows, pages of 4 tokens: in 40 steps each gains 10 blocks in each of the three groups, and a slide sends
    nothing."""
    simulation = Simulation(
        SPECS, page_tokens=4, max_model_len=90, extra_slabs=200, chunk_tokens=40, max_num_seqs=3, interval_tokens=4
    )
    device = Device(simulation, NeverFails())
    device.tables.reserve(3, [23, 12, 12])
    for index in range(3):
        simulation.add(f"r{index}", [50 + index] * 12, 60)
    simulation.step()
    assert device.sent == [3 * 3 * 3], "three blocks in three tables of three rows"
    del device.sent[:]
    for _ in range(40):
        simulation.step()
    assert len(device.sent) == 40
    assert sum(device.sent) == 3 * 3 * 10
    slid = simulation.manager.inspect().rows.first_kept[1]
    assert (slid > 8).all(), "meanwhile windows have slid"


class NeverFails(random.Random):
    def random(self) -> float:
        return 0.5


def test_windows_take_no_more_columns_than_they_have_blocks():
    """A context of 22 blocks: the lines of the windows wrap around."""
    simulation = Simulation(
        SPECS, page_tokens=4, max_model_len=90, extra_slabs=200, chunk_tokens=8, max_num_seqs=1, interval_tokens=4
    )
    device = Device(simulation, NeverFails())
    simulation.add("a", [7], 87)
    simulation.run()
    widths = [table.shape[1] for table in device.tables.tables]
    assert widths[0] >= 22
    assert max(widths[1:]) < 16


def test_wider_tables_are_new_ones_with_all_that_a_plan_reads():
    simulation = Simulation([full()], page_tokens=1, max_model_len=90, extra_slabs=200, chunk_tokens=40, max_num_seqs=2)
    device = Device(simulation, NeverFails())
    simulation.add("a", [7], 80)
    seen = set()
    for _ in range(70):
        simulation.step()
        seen.add(device.tables.entries.data_ptr())
    assert 2 <= len(seen) <= 6
    device.tables.reserve(2, [90])
    kept = device.tables.entries
    device.tables.reserve(1, [80])
    simulation.run()
    assert device.tables.entries is kept, "there was room"


def test_a_plan_made_by_hand_is_compared_entry_by_entry():
    """Nothing is known of its rows: the same pages send nothing, others what differs."""
    plan = random_plan(3, [1, 1, 4], page_tokens=4)
    tables = DeviceTables(CPU, build_layout([full(), sliding(6)], page_tokens=4))
    upload = StepUpload(CPU)
    _, first = send_step(upload, tables, plan)
    _, again = send_step(upload, tables, plan)
    assert (first.num_changes > 6, again.num_changes) == (True, 0)
    plan.groups[1].block_tables[2, 0] += 1
    _, changed = send_step(upload, tables, plan)
    assert changed.num_changes == 1


class Interruption(BaseException):
    """What is raised at a line."""


def raising_at(number: int, call) -> bool:
    """Call it, and raise at the given line of what brings tables to a device, counted from 0 as they run. Whether there
    was such a line."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in TRACED_FILES:
            return None
        if event == "line":
            lines += 1
            if lines == number + 1:
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


TRACED_FILES = {table_changes.__file__, device_tables.__file__, step_buffers.__file__}


@pytest.mark.parametrize("widens", [False, True])
def test_whatever_line_a_launch_fails_at_the_next_one_is_right(widens):
    """A step that changes a row, a new block and a stamp fails; the next step has the stamps of the failed one, so that
    what is taken for sent and was not would show."""
    layout = build_layout([full(), sliding(6)], page_tokens=4)
    before = random_plan(1, [1, 1, 4], page_tokens=4)
    before = replace(before, tables=TableVersions(np.array([2, 0, 1]), np.arange(6).reshape(2, 3)))
    after = random_plan(2, [1, 3, 4, 1], (40, 5) if widens else (6, 3), page_tokens=4)
    after = replace(after, tables=TableVersions(np.array([2, 0, 3, 1]), np.arange(10, 18).reshape(2, 4)))
    number = 0
    while True:
        tables, upload = DeviceTables(CPU, layout), StepUpload(CPU)
        tables.reserve(4, [8, 8])
        send_step(upload, tables, before)
        has_failed = raising_at(number, lambda: send_step(upload, tables, after))  # noqa: B023
        send_step(upload, tables, after)
        for group, (table, part) in enumerate(zip(tables.tables, after.groups, strict=True)):
            for index, row in enumerate(after.tables.rows.tolist()):
                for block in range(int(part.first_blocks[index]), -(-int(after.seq_lens[index]) // 4)):
                    page = part.block_tables[index, block - part.first_blocks[index]]
                    assert table[row, block % table.shape[1]] == page, (number, group, row, block)
        if not has_failed:
            break
        number += 1
    assert number > 60
