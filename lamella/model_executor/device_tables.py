"""The block tables on the device, by row: they stay, and a step brings only the entries that changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.step_memory import NO_STAMP, TableVersions
from lamella.kv_cache.table_changes import TableChanges, TableCopy, needs
from lamella.model_executor.step_plan import StepPlan


class DeviceTables:
    """tables: int64 [num_rows, width] of each group, block b of a row in column b % width; a group without windows has
    a column for each block of a row. They are views of `entries`, int64 [num_rows * sum of the widths]. first_blocks:
    int64 [num_rows], all 0: no line begins later (see AttentionMetadata).

    A step's changes travel with its other arrays, between `changes` and `write`: whatever is raised there, the next
    step sends what it reads anew (`TableCopy`). A step that needs more rows or wider tables than there are gets new
    ones; until then addresses stay.
    """

    def __init__(self, device: torch.device, layout: KVLayout) -> None:
        self._device, self._page_tokens = device, layout.page_tokens
        self._is_windowed = [group.spec.is_windowed for group in layout.groups]
        self._allocate(0, [0] * len(layout.groups))

    def _allocate(self, num_rows: int, widths: Sequence[int]) -> None:
        copy = TableCopy(num_rows, widths)
        entries = torch.full((copy.num_entries,), NULL_PAGE, dtype=torch.int64, device=self._device)
        parts = entries.split([num_rows * width for width in widths])
        self.tables = [part.view(num_rows, width) for part, width in zip(parts, widths, strict=True)]
        self.entries, self._copy = entries, copy
        self.first_blocks = torch.zeros(num_rows, dtype=torch.int64, device=self._device)

    @property
    def num_bytes(self) -> int:
        return self.entries.nbytes

    def reserve(self, num_rows: int, widths: Sequence[int]) -> None:
        """Make room for so many rows, and so many blocks of each group; there may be more room already."""
        copy = self._copy
        if num_rows > copy.num_rows or any(need > width for need, width in zip(widths, copy.widths, strict=True)):
            wider = [max(pair) for pair in zip(widths, copy.widths, strict=True)]
            self._allocate(max(num_rows, copy.num_rows), wider)

    def changes(self, plan: StepPlan) -> TableChanges:
        """What the tables lack of the plan's. `write` them next."""
        versions = table_versions(plan)
        num_blocks = -(-plan.seq_lens // self._page_tokens)
        num_rows, widths = needs(plan.groups, versions, num_blocks, self._is_windowed)
        if num_rows > self._copy.num_rows or any(
            need > width for need, width in zip(widths, self._copy.widths, strict=True)
        ):
            # With room to spare, so that growing contexts seldom mean new tables.
            self.reserve(num_rows, [need + need // 4 + 8 for need in widths])
        return self._copy.changes(plan.groups, versions, num_blocks)

    def write(self, places: torch.Tensor, pages: torch.Tensor) -> None:
        """The changes, on the device (int64 [n] each)."""
        if len(places):
            self.entries.scatter_(0, places, pages)
        self._copy.wrote()


def table_versions(plan: StepPlan) -> TableVersions:
    """The rows of the plan's requests, and the stamps of their tables."""
    if plan.tables is not None:
        return plan.tables
    num_requests = len(plan.seq_lens)
    return TableVersions(np.arange(num_requests), np.full((len(plan.groups), num_requests), NO_STAMP))
