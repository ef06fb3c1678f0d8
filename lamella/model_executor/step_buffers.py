"""A step's arrays where the model reads them: views of the plan's own on a CPU, one packed copy on a device.

All arrays of a step are int64, so they travel as one: token ids, positions and the requests' arrays first, whose places
follow from the numbers of requests and tokens alone, then the block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.step_memory import GroupPlan
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
    of id and position 0 in no slot, with a context of no keys and a table of null pages."""

    num_requests: int
    num_tokens: int
    table_widths: tuple[int, ...]  # blocks, of each group

    @staticmethod
    def of(plan: StepPlan) -> PackedShape:
        widths = tuple(group.block_tables.shape[1] for group in plan.groups)
        return PackedShape(len(plan.seq_lens), len(plan.token_ids), widths)

    def padded_to(self, num_requests: int) -> PackedShape:
        num_tokens = self.num_tokens + num_requests - self.num_requests
        return PackedShape(num_requests, num_tokens, self.table_widths)

    @property
    def sections(self) -> tuple[int, ...]:
        """Entries of each array before the tables, in their order."""
        requests, tokens = self.num_requests, self.num_tokens
        return (tokens, tokens, requests + 1, requests, *(requests, requests, tokens) * len(self.table_widths))

    @property
    def num_fixed(self) -> int:
        """Entries before the tables."""
        return sum(self.sections)

    @property
    def num_entries(self) -> int:
        return self.num_fixed + self.num_requests * sum(self.table_widths)

    def pack(self, plan: StepPlan, target: np.ndarray) -> None:
        """Write the plan's arrays and the padding into `target`, int64 [num_entries]."""
        end = 0

        def put(values: np.ndarray, length: int, padding: int | np.ndarray) -> None:
            nonlocal end
            begin, end = end, end + length
            target[begin : begin + values.size] = values.ravel()
            target[begin + values.size : end] = padding

        requests, tokens = self.num_requests, self.num_tokens
        put(plan.token_ids, tokens, 0)
        put(plan.positions, tokens, 0)
        put(plan.query_start, requests + 1, np.arange(len(plan.query_start), requests + 1))
        put(plan.seq_lens, requests, 0)
        for group in plan.groups:
            put(group.first_blocks, requests, 0)
            put(group.first_keys, requests, 0)
            put(group.slot_mapping, tokens, NO_SLOT)
        for group, width in zip(plan.groups, self.table_widths, strict=True):
            put(group.block_tables, requests * width, NULL_PAGE)

    def tables(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The block tables in a packed step, int64 [num_requests, width] of each group."""
        sizes = [self.num_requests * width for width in self.table_widths]
        parts = packed[self.num_fixed : self.num_entries].split(sizes)
        return [part.view(self.num_requests, width) for part, width in zip(parts, self.table_widths, strict=True)]

    def inputs(
        self, packed: torch.Tensor, tables: Sequence[torch.Tensor], plan: StepPlan, page_tokens: int
    ) -> StepInputs:
        """Views of a packed step, int64 [>= num_fixed], and of its block tables, which may lie elsewhere. plan: the
        same step on the host."""
        token_ids, positions, query_start, seq_lens, *rest = packed[: self.num_fixed].split(self.sections)
        parts = zip(plan.groups, tables, rest[0::3], rest[1::3], rest[2::3], strict=True)
        metadata = tuple(
            _metadata(plan, group, page_tokens, query_start, seq_lens, first_blocks, first_keys, table, slot_mapping)
            for group, table, first_blocks, first_keys, slot_mapping in parts
        )
        return StepInputs(token_ids, positions, metadata)


def host_inputs(plan: StepPlan, page_tokens: int) -> StepInputs:
    """Views of the plan's own arrays: on a CPU nothing is copied."""
    view = torch.from_numpy
    query_start, seq_lens = view(plan.query_start), view(plan.seq_lens)
    metadata = tuple(
        _metadata(
            plan,
            group,
            page_tokens,
            query_start,
            seq_lens,
            view(group.first_blocks),
            view(group.first_keys),
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

    def send(self, plan: StepPlan, shape: PackedShape) -> torch.Tensor:
        """The plan in packed form, int64 [shape.num_entries] on the device."""
        num_entries = shape.num_entries
        self._turn = turn = (self._turn + 1) % NUM_STAGING_BUFFERS
        self._waits[turn]()
        if len(self._staging[turn]) < num_entries:
            self._staging[turn] = self._copier.allocate(2 * num_entries)
        source = self._staging[turn][:num_entries]
        shape.pack(plan, source.numpy())
        packed = torch.empty(num_entries, dtype=torch.int64, device=self._device)
        self._waits[turn] = self._copier.start(packed, source)
        return packed


def _nothing() -> None:
    pass
