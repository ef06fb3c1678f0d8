"""A step's arrays on the device are the plan's, however late the copies run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.layout import KVLayout, build_layout
from lamella.kv_cache.step_memory import TableVersions
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.step_buffers import PackedShape, StepInputs, StepUpload, host_inputs, send_step
from lamella.model_executor.step_plan import StepPlan
from tests.helpers import device_plans
from tests.helpers.simulation import full, sliding

PAGE_TOKENS = 8
CPU = torch.device("cpu")


def random_plan(seed: int, lengths: list[int], widths: tuple[int, ...] = (6, 3)) -> StepPlan:
    return device_plans.random_plan(seed, lengths, widths, page_tokens=PAGE_TOKENS)


def layout_of(num_groups: int) -> KVLayout:
    return build_layout([full(), *(sliding(4 + window) for window in range(num_groups - 1))], page_tokens=PAGE_TOKENS)


def sent(upload: StepUpload, plan: StepPlan, tables: DeviceTables) -> StepInputs:
    packed, shape = send_step(upload, tables, plan)
    return shape.inputs(packed, tables, plan, PAGE_TOKENS)


def check(inputs: StepInputs, plan: StepPlan) -> None:
    assert inputs.token_ids.tolist() == plan.token_ids.tolist()
    assert inputs.positions.tolist() == plan.positions.tolist()
    assert len(inputs.metadata) == len(plan.groups)
    for metadata, group in zip(inputs.metadata, plan.groups, strict=True):
        assert metadata.page_tokens == PAGE_TOKENS
        assert metadata.num_decodes == plan.num_decodes
        for source, names in ((plan, ("query_start", "seq_lens")), (group, ("first_keys", "slot_mapping"))):
            for name in names:
                assert getattr(metadata, name).tolist() == getattr(source, name).tolist(), name
        for source, names in ((plan, ("query_start", "seq_lens")), (group, ("first_blocks", "first_keys"))):
            for name in names:
                assert getattr(metadata, f"{name}_host") is getattr(source, name), name
        assert metadata.block_tables_host is group.block_tables
        assert {tensor.dtype for tensor in tensors_of(metadata)} == {torch.int64}


def check_tables(inputs: StepInputs, plan: StepPlan) -> None:
    """Every block that a request has is where the metadata says, one at a time."""
    for metadata, group in zip(inputs.metadata, plan.groups, strict=True):
        for request, seq_len in enumerate(plan.seq_lens.tolist()):
            line = metadata.block_tables[metadata.table_rows[request]]
            for block in range(int(group.first_blocks[request]), -(-seq_len // PAGE_TOKENS)):
                page = group.block_tables[request, block - group.first_blocks[request]]
                assert line[(block - int(metadata.first_blocks[request])) % len(line)] == page


GROUP_ARRAYS = ("first_blocks", "first_keys", "block_tables", "slot_mapping")


def tensors_of(metadata: AttentionMetadata) -> list[torch.Tensor]:
    values = [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]
    return [value for value in values if isinstance(value, torch.Tensor)]


STEPS = [[1], [1, 1, 1], [1, 1, 5, 9], [40], [1], [3, 2]]


@pytest.mark.parametrize("widths", [(6, 3), (1,), (2, 1, 7)])
def test_what_arrives_is_the_plan(widths):
    upload, tables = StepUpload(CPU), DeviceTables(CPU, layout_of(len(widths)))
    for seed, lengths in enumerate(STEPS):
        plan = random_plan(seed, lengths, widths)
        inputs = sent(upload, plan, tables)
        check(inputs, plan)
        check_tables(inputs, plan)


def test_rows_go_with_the_plan():
    """Requests that have other rows than their numbers, and stamps: the second time nothing has to be sent."""
    plan = random_plan(5, [1, 1, 3])
    stamps = np.arange(6).reshape(2, 3)
    plan = dataclasses.replace(plan, tables=TableVersions(np.array([4, 0, 2]), stamps))
    tables, upload = DeviceTables(CPU, layout_of(2)), StepUpload(CPU)
    inputs = sent(upload, plan, tables)
    assert [metadata.table_rows.tolist() for metadata in inputs.metadata] == [[4, 0, 2]] * 2
    check_tables(inputs, plan)
    assert send_step(upload, tables, plan)[1].num_changes == 0


def test_padding():
    plan = random_plan(1, [1, 1], (3, 2))
    tables = DeviceTables(CPU, layout_of(2))
    tables.reserve(4, [3, 2])
    packed, shape = send_step(StepUpload(CPU), tables, plan, num_requests=4)
    inputs = shape.inputs(packed, tables, plan, PAGE_TOKENS)
    assert inputs.token_ids.tolist() == [*plan.token_ids, 0, 0]
    assert inputs.positions.tolist() == [*plan.positions, 0, 0]
    check_tables(inputs, plan)
    for metadata, group in zip(inputs.metadata, plan.groups, strict=True):
        assert metadata.query_start.tolist() == [0, 1, 2, 3, 4]
        assert metadata.seq_lens.tolist() == [*plan.seq_lens, 0, 0], "no keys, so nobody looks at the table"
        assert metadata.first_keys.tolist() == [*group.first_keys, 0, 0]
        assert metadata.slot_mapping.tolist() == [*group.slot_mapping, -1, -1]
        assert metadata.first_blocks.tolist() == [0] * 4
        assert (metadata.table_rows < len(metadata.block_tables)).all()


def test_on_the_host_nothing_is_copied():
    plan = random_plan(2, [1, 1, 7])
    inputs = host_inputs(plan, PAGE_TOKENS)
    check(inputs, plan)
    check_tables(inputs, plan)
    arrays = [plan.token_ids, plan.positions, plan.query_start, plan.seq_lens]
    arrays += [getattr(group, name) for group in plan.groups for name in GROUP_ARRAYS]
    rows = inputs.metadata[0].table_rows
    tensors = [inputs.token_ids, inputs.positions, *(tensor for one in inputs.metadata for tensor in tensors_of(one))]
    pointers = {tensor.data_ptr() for tensor in tensors if tensor is not rows}
    assert pointers == {array.ctypes.data for array in arrays}
    assert rows.tolist() == [0, 1, 2]


class LateCopies:
    """A device that copies only when someone waits for it, in the order in which copies were started."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_started = 0

    def allocate(self, num_entries: int) -> torch.Tensor:
        return torch.empty(num_entries, dtype=torch.int64)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        target.fill_(-(2**40))
        self.pending.append((target, source))
        self.num_started += 1
        number = self.num_started
        return lambda: self.run_until(number)

    def run_until(self, number: int) -> None:
        while self.pending and self.num_started - len(self.pending) < number:
            target, source = self.pending.pop(0)
            target.copy_(source)


class Arriving:
    """A plan that has been sent; its changes are not written before they arrive."""

    def __init__(self, upload: StepUpload, tables: DeviceTables, plan: StepPlan) -> None:
        self.plan, self.changes = plan, tables.changes(plan)
        self.shape = PackedShape.of(plan, self.changes)
        self.packed = upload.send(plan, self.shape, self.changes)
        self.inputs = self.shape.inputs(self.packed, tables, plan, PAGE_TOKENS)

    def check(self) -> None:
        check(self.inputs, self.plan)
        assert self.shape.num_changes > 0
        for array, tensor in zip(self.changes, self.shape.changes(self.packed), strict=True):
            assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("growing", [True, False])
def test_a_copy_that_runs_late_still_brings_its_own_step(growing):
    """The next step is sent while the last one's copy has not begun; larger ones need new memory."""
    copies = LateCopies()
    upload, tables = StepUpload(CPU, copies), DeviceTables(CPU, layout_of(2))
    tables.reserve(30, [6, 3])
    lengths = [[2 + 3 * step] for step in range(8)]
    plans = [random_plan(step, each) for step, each in enumerate(lengths if growing else lengths[::-1])]
    arrived = []
    for step, plan in enumerate(plans):
        arrived.append(Arriving(upload, tables, plan))
        assert copies.num_started == step + 1, "one copy a step"
        assert len(copies.pending) <= 2
    assert len(copies.pending) == 2, "planning a step waits for no copy of the last one"
    copies.run_until(len(plans))
    for one in arrived:
        one.check()


def test_one_staging_buffer_would_not_do(monkeypatch):
    monkeypatch.setattr("lamella.model_executor.step_buffers.NUM_STAGING_BUFFERS", 1)
    with pytest.raises(AssertionError, match="waits for no copy"):
        test_a_copy_that_runs_late_still_brings_its_own_step(growing=False)


def test_writing_without_waiting_is_noticed():
    class Careless(LateCopies):
        def start(self, target, source):
            super().start(target, source)
            return lambda: None

    copies = Careless()
    upload, tables = StepUpload(CPU, copies), DeviceTables(CPU, layout_of(2))
    tables.reserve(30, [6, 3])
    plans = [random_plan(step, [9]) for step in range(3)]
    arrived = [Arriving(upload, tables, plan) for plan in plans]
    copies.run_until(3)
    arrived[1].check()
    with pytest.raises(AssertionError):
        arrived[0].check()
