"""A step's arrays where the model reads them: views of the plan's own on a CPU, one packed copy on a device.

All arrays of a step are int64, so they travel as one: token ids, positions and the requests' arrays first, whose places
follow from the numbers of requests and tokens alone, then what changed in the block tables (`DeviceTables`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.step_memory import GroupPlan
from lamella.kv_cache.table_changes import TableChanges
from lamella.model_executor.device_tables import DeviceTables, table_versions
from lamella.model_executor.step_plan import StepPlan

NUM_STAGING_BUFFERS = 2  # one is written for the next step while the other's copy may still run
NULL_PAGE = -1
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model reads of a step. token_ids may be written to until the model runs."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: tuple[AttentionMetadata, ...]  # of each group


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Sizes of a step in packed form. Requests and tokens beyond a plan's are padding: a padded request is one token
    of id and position 0 in no slot, with a context of no keys, so that nobody looks at its table (row 0's)."""

    num_requests: int
    num_tokens: int
    num_groups: int
    num_changes: int = 0  # entries of the block tables that come with the step

    @staticmethod
    def of(plan: StepPlan, changes: TableChanges | None = None) -> PackedShape:
        num_changes = 0 if changes is None else len(changes.places)
        return PackedShape(len(plan.seq_lens), len(plan.token_ids), len(plan.groups), num_changes)

    def padded_to(self, num_requests: int) -> PackedShape:
        return replace(self, num_requests=num_requests, num_tokens=self.num_tokens + num_requests - self.num_requests)

    @property
    def sections(self) -> tuple[int, ...]:
        """Entries of each array before the changes, in their order."""
        requests, tokens = self.num_requests, self.num_tokens
        return (tokens, tokens, requests + 1, requests, requests, *(requests, tokens) * self.num_groups)

    @property
    def num_fixed(self) -> int:
        """Entries before the changes."""
        return sum(self.sections)

    @property
    def num_entries(self) -> int:
        return self.num_fixed + 2 * self.num_changes

    def pack(self, plan: StepPlan, target: np.ndarray, changes: TableChanges | None = None) -> None:
        """Write the plan's arrays, the padding and the changes into `target`, int64 [num_entries]."""
        end = 0

        def put(values: np.ndarray, length: int, padding: int | np.ndarray) -> None:
            nonlocal end
            begin, end = end, end + length
            target[begin : begin + values.size] = values
            target[begin + values.size : end] = padding

        requests, tokens = self.num_requests, self.num_tokens
        put(plan.token_ids, tokens, 0)
        put(plan.positions, tokens, 0)
        put(plan.query_start, requests + 1, np.arange(len(plan.query_start), requests + 1))
        put(plan.seq_lens, requests, 0)
        put(table_versions(plan).rows, requests, 0)
        for group in plan.groups:
            put(group.first_keys, requests, 0)
            put(group.slot_mapping, tokens, NO_SLOT)
        if changes is not None:
            put(changes.places, self.num_changes, 0)
            put(changes.pages, self.num_changes, 0)

    def changes(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The changes in a packed step: int64 [num_changes] places and pages."""
        places, pages = packed[self.num_fixed : self.num_entries].view(2, self.num_changes)
        return places, pages

    def inputs(self, packed: torch.Tensor, tables: DeviceTables, plan: StepPlan, page_tokens: int) -> StepInputs:
        """Views of a packed step, int64 [>= num_fixed], and the tables with its changes in them. plan: the same step on
        the host."""
        token_ids, positions, query_start, seq_lens, rows, *rest = packed[: self.num_fixed].split(self.sections)
        first_blocks = tables.first_blocks[: self.num_requests]
        parts = zip(plan.groups, tables.tables, rest[0::2], rest[1::2], strict=True)
        metadata = tuple(
            _metadata(plan, group, page_tokens, query_start, seq_lens, first_blocks, first_keys, rows, table, slots)
            for group, table, first_keys, slots in parts
        )
        return StepInputs(token_ids, positions, metadata)


def host_inputs(plan: StepPlan, page_tokens: int) -> StepInputs:
    """Views of the plan's own arrays: on a CPU nothing is copied."""
    view = torch.from_numpy
    query_start, seq_lens = view(plan.query_start), view(plan.seq_lens)
    rows = view(np.arange(len(plan.seq_lens)))
    metadata = tuple(
        _metadata(
            plan,
            group,
            page_tokens,
            query_start,
            seq_lens,
            view(group.first_blocks),
            view(group.first_keys),
            rows,
            view(group.block_tables),
            view(group.slot_mapping),
        )
        for group in plan.groups
    )
    return StepInputs(view(plan.token_ids), view(plan.positions), metadata)


def _metadata(
    plan: StepPlan,
    group: GroupPlan,
    page_tokens: int,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    first_blocks: torch.Tensor,
    first_keys: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> AttentionMetadata:
    return AttentionMetadata(
        page_tokens=page_tokens,
        num_decodes=plan.num_decodes,
        query_start=query_start,
        seq_lens=seq_lens,
        first_blocks=first_blocks,
        first_keys=first_keys,
        table_rows=table_rows,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        query_start_host=plan.query_start,
        seq_lens_host=plan.seq_lens,
        first_blocks_host=group.first_blocks,
        first_keys_host=group.first_keys,
        block_tables_host=group.block_tables,
    )


class Copier(Protocol):
    """Copies from the host's memory to a device's."""

    def allocate(self, num_entries: int) -> torch.Tensor:
        """Host memory to copy from, int64 [num_entries]."""
        ...

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Begin a copy, in order with the device's other work. Returns a function that waits until `source` may be
        overwritten."""
        ...


class DirectCopier:
    """Pinned memory and non-blocking copies to a CUDA device; plain ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def allocate(self, num_entries: int) -> torch.Tensor:
        return torch.empty(num_entries, dtype=torch.int64, pin_memory=self._is_cuda)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        target.copy_(source, non_blocking=self._is_cuda)
        if not self._is_cuda:
            return _nothing
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(target.device))
        return copied.synchronize


class StepUpload:
    """Sends plans to a device, each with one copy that nobody waits for.

    The host's memory that a copy reads is not written again before the copy is done: two buffers take turns.
    """

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self._device = device
        self._copier: Copier = DirectCopier(device) if copier is None else copier
        self._staging = [torch.empty(0, dtype=torch.int64)] * NUM_STAGING_BUFFERS
        self._waits: list[Callable[[], object]] = [_nothing] * NUM_STAGING_BUFFERS
        self._turn = 0

    def send(self, plan: StepPlan, shape: PackedShape, changes: TableChanges | None = None) -> torch.Tensor:
        """The plan in packed form, with the changes that it brings: int64 [shape.num_entries] on the device."""
        num_entries = shape.num_entries
        self._turn = turn = (self._turn + 1) % NUM_STAGING_BUFFERS
        self._waits[turn]()
        if len(self._staging[turn]) < num_entries:
            self._staging[turn] = self._copier.allocate(2 * num_entries)
        source = self._staging[turn][:num_entries]
        shape.pack(plan, source.numpy(), changes)
        packed = torch.empty(num_entries, dtype=torch.int64, device=self._device)
        self._waits[turn] = self._copier.start(packed, source)
        return packed


def send_step(
    upload: StepUpload, tables: DeviceTables, plan: StepPlan, *, num_requests: int | None = None
) -> tuple[torch.Tensor, PackedShape]:
    """Send the plan, padded to so many requests of one token, and bring the tables to what it needs: one copy, and one
    launch where an entry changed. Returns what was sent, int64 [num_entries], and its shape."""
    changes = tables.changes(plan)
    shape = PackedShape.of(plan, changes)
    if num_requests is not None:
        shape = shape.padded_to(num_requests)
    packed = upload.send(plan, shape, changes)
    tables.write(*shape.changes(packed))
    return packed, shape


def _nothing() -> None:
    pass
