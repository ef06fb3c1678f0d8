"""The block tables on the device, by row: they stay, and a step brings only the entries that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.step_memory import NO_STAMP, TableVersions
from lamella.kv_cache.table_changes import TableChanges, TableCopy, needs
from lamella.model_executor.step_plan import StepPlan


class _Memory(NamedTuple):
    """Tables of one size, and what is known to be in them: they are replaced together."""

    entries: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    first_blocks: torch.Tensor
    copy: TableCopy

    @staticmethod
    def allocate(device: torch.device, num_rows: int, widths: Sequence[int]) -> _Memory:
        copy = TableCopy(num_rows, widths)
        entries = torch.full((copy.num_entries,), NULL_PAGE, dtype=torch.int64, device=device)
        parts = entries.split([num_rows * width for width in widths])
        tables = tuple(part.view(num_rows, width) for part, width in zip(parts, widths, strict=True))
        return _Memory(entries, tables, torch.zeros(num_rows, dtype=torch.int64, device=device), copy)

    def holds(self, num_rows: int, widths: Sequence[int]) -> bool:
        has_columns = all(need <= width for need, width in zip(widths, self.copy.widths, strict=True))
        return num_rows <= self.copy.num_rows and has_columns


class DeviceTables:
    """A line for each row in each group's table; block b is in column b % width, and where a group has no windows, a
    line has a column for each block of a row.

    A step's changes travel with its other arrays, between `changes` and `write`: whatever is raised there, the next
    step sends what it reads anew (`TableCopy`). A step that needs more rows or wider tables than there are gets new
    ones; until then addresses stay.
    """

    def __init__(self, device: torch.device, layout: KVLayout) -> None:
        self._device, self._page_tokens = device, layout.page_tokens
        self._is_windowed = [group.spec.is_windowed for group in layout.groups]
        self._memory = _Memory.allocate(device, 0, [0] * len(layout.groups))

    @property
    def entries(self) -> torch.Tensor:
        """All tables' entries, one group's after the other's: int64 [num_rows * sum of the widths]."""
        return self._memory.entries

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """Of each group, int64 [num_rows, width]: views of `entries`."""
        return self._memory.tables

    @property
    def first_blocks(self) -> torch.Tensor:
        """int64 [num_rows], all 0: see AttentionMetadata."""
        return self._memory.first_blocks

    @property
    def num_bytes(self) -> int:
        return self._memory.entries.nbytes + self._memory.first_blocks.nbytes

    def reserve(self, num_rows: int, widths: Sequence[int]) -> None:
        """Make room for so many rows, and so many blocks of each group; there may be more room already."""
        if not self._memory.holds(num_rows, widths):
            copy = self._memory.copy
            wider = [max(pair) for pair in zip(widths, copy.widths, strict=True)]
            self._memory = _Memory.allocate(self._device, max(num_rows, copy.num_rows), wider)

    def changes(self, plan: StepPlan) -> TableChanges:
        """What the tables lack of the plan's. `write` them next."""
        versions = table_versions(plan)
        num_blocks = -(-plan.seq_lens // self._page_tokens)
        num_rows, widths = needs(plan.groups, versions, num_blocks, self._is_windowed)
        if not self._memory.holds(num_rows, widths):
            # With room to spare, so that growing contexts seldom mean new tables.
            self.reserve(num_rows, [need + need // 4 + 8 for need in widths])
        return self._memory.copy.changes(plan.groups, versions, num_blocks)

    def write(self, places: torch.Tensor, pages: torch.Tensor) -> None:
        """The changes, on the device (int64 [n] each)."""
        if len(places):
            self._memory.entries.scatter_(0, places, pages)
        self._memory.copy.wrote()


def table_versions(plan: StepPlan) -> TableVersions:
    """The rows of the plan's requests, and the stamps of their tables."""
    if plan.tables is not None:
        return plan.tables
    num_requests = len(plan.seq_lens)
    return TableVersions(np.arange(num_requests), np.full((len(plan.groups), num_requests), NO_STAMP))
