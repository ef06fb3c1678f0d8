"""A step's arrays on the device are the plan's, however late the copies run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.model_executor.decode_graphs import padding_plan
from lamella.model_executor.step_buffers import PackedShape, StepInputs, StepUpload, host_inputs
from lamella.model_executor.step_plan import StepPlan

PAGE_TOKENS = 8
CPU = torch.device("cpu")


def random_plan(seed: int, lengths: list[int], widths: tuple[int, ...] = (6, 3)) -> StepPlan:
    """lengths: new tokens of each request."""
    generator = np.random.default_rng(seed)
    count, num_tokens = len(lengths), sum(lengths)

    def numbers(*shape: int) -> np.ndarray:
        return generator.integers(0, 10_000, size=shape)

    plan = padding_plan(count, widths)
    groups = tuple(
        dataclasses.replace(
            group,
            block_tables=numbers(count, width),
            first_blocks=numbers(count),
            first_keys=numbers(count),
            slot_mapping=numbers(num_tokens),
        )
        for group, width in zip(plan.groups, widths, strict=True)
    )
    return dataclasses.replace(
        plan,
        token_ids=numbers(num_tokens),
        positions=numbers(num_tokens),
        query_start=np.cumsum([0, *lengths]),
        seq_lens=numbers(count),
        num_decodes=lengths.count(1),
        groups=groups,
    )


def sent(upload: StepUpload, plan: StepPlan) -> StepInputs:
    shape = PackedShape.of(plan)
    packed = upload.send(plan, shape)
    return shape.inputs(packed, shape.tables(packed), plan, PAGE_TOKENS)


def check(inputs: StepInputs, plan: StepPlan) -> None:
    assert inputs.token_ids.tolist() == plan.token_ids.tolist()
    assert inputs.positions.tolist() == plan.positions.tolist()
    assert len(inputs.metadata) == len(plan.groups)
    for metadata, group in zip(inputs.metadata, plan.groups, strict=True):
        assert metadata.page_tokens == PAGE_TOKENS
        assert metadata.num_decodes == plan.num_decodes
        for source, names in ((plan, ("query_start", "seq_lens")), (group, GROUP_ARRAYS)):
            for name in names:
                assert getattr(metadata, name).tolist() == getattr(source, name).tolist(), name
                assert getattr(metadata, f"{name}_host", getattr(source, name)) is getattr(source, name), name
        assert {tensor.dtype for tensor in tensors_of(metadata)} == {torch.int64}


GROUP_ARRAYS = ("first_blocks", "first_keys", "block_tables", "slot_mapping")


def tensors_of(metadata: AttentionMetadata) -> list[torch.Tensor]:
    values = [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]
    return [value for value in values if isinstance(value, torch.Tensor)]


STEPS = [[1], [1, 1, 1], [1, 1, 5, 9], [40], [1], [3, 2]]


@pytest.mark.parametrize("widths", [(6, 3), (1,), (2, 0, 7)])
def test_what_arrives_is_the_plan(widths):
    upload = StepUpload(CPU)
    for seed, lengths in enumerate(STEPS):
        plan = random_plan(seed, lengths, widths)
        check(sent(upload, plan), plan)


def test_padding():
    plan = random_plan(1, [1, 1], (3, 2))
    shape = PackedShape.of(plan).padded_to(4)
    packed = StepUpload(CPU).send(plan, shape)
    inputs = shape.inputs(packed, shape.tables(packed), plan, PAGE_TOKENS)
    assert inputs.token_ids.tolist() == [*plan.token_ids, 0, 0]
    assert inputs.positions.tolist() == [*plan.positions, 0, 0]
    for metadata, group in zip(inputs.metadata, plan.groups, strict=True):
        assert metadata.query_start.tolist() == [0, 1, 2, 3, 4]
        assert metadata.seq_lens.tolist() == [*plan.seq_lens, 0, 0]
        assert metadata.first_blocks.tolist() == [*group.first_blocks, 0, 0]
        assert metadata.first_keys.tolist() == [*group.first_keys, 0, 0]
        assert metadata.slot_mapping.tolist() == [*group.slot_mapping, -1, -1]
        null_row = [-1] * group.block_tables.shape[1]
        assert metadata.block_tables.tolist() == [*group.block_tables.tolist(), null_row, null_row]


def test_on_the_host_nothing_is_copied():
    plan = random_plan(2, [1, 1, 7])
    inputs = host_inputs(plan, PAGE_TOKENS)
    check(inputs, plan)
    arrays = [plan.token_ids, plan.positions, plan.query_start, plan.seq_lens]
    arrays += [getattr(group, name) for group in plan.groups for name in GROUP_ARRAYS]
    tensors = [inputs.token_ids, inputs.positions, *(tensor for one in inputs.metadata for tensor in tensors_of(one))]
    assert {tensor.data_ptr() for tensor in tensors} == {array.ctypes.data for array in arrays}


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


@pytest.mark.parametrize("growing", [True, False])
def test_a_copy_that_runs_late_still_brings_its_own_step(growing):
    """The next step is sent while the last one's copy has not begun; larger ones need new memory."""
    copies = LateCopies()
    upload = StepUpload(CPU, copies)
    lengths = [[2 + 3 * step] for step in range(8)]
    plans = [random_plan(step, each) for step, each in enumerate(lengths if growing else lengths[::-1])]
    arrived = []
    for step, plan in enumerate(plans):
        arrived.append(sent(upload, plan))
        assert copies.num_started == step + 1, "one copy a step"
        assert len(copies.pending) <= 2
    assert len(copies.pending) == 2, "planning a step waits for no copy of the last one"
    copies.run_until(len(plans))
    for inputs, plan in zip(arrived, plans, strict=True):
        check(inputs, plan)


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
    upload = StepUpload(CPU, copies)
    plans = [random_plan(step, [9]) for step in range(3)]
    arrived = [sent(upload, plan) for plan in plans]
    copies.run_until(3)
    check(arrived[1], plans[1])
    with pytest.raises(AssertionError):
        check(arrived[0], plans[0])
