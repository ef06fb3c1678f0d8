"""The block tables of the scheduled rows as arrays, copied again only where something changed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.step_memory import NO_STAMP


class GroupTables(NamedTuple):
    """One group's tables, as AttentionMetadata wants them. Columns that a row has no block for are NULL_PAGE."""

    block_tables: np.ndarray  # int64 [R, width], contiguous
    first_blocks: np.ndarray  # int64 [R]


class GatheredTables:
    """Keeps what was gathered for earlier steps. Where a row has grown by one block, one entry is written; a row
    whose entries have changed (see `RowTables.stamps`) is copied; every other row costs a comparison.

    Two sets of arrays are used in turn. So what `gather` returned holds until the call after the next, and one step can
    run while another is planned. Nobody else may write to these arrays.
    """

    def __init__(self, tables: RowTables) -> None:
        self._sets = (_ArraySet(tables), _ArraySet(tables))
        self._turn = 0

    def gather(self, rows: np.ndarray) -> list[GroupTables]:
        """Per group the tables of `rows` (int64 [R], each at most once), at least as wide as the longest needs."""
        self._turn = 1 - self._turn
        return self._sets[self._turn].gather(rows)


class _ArraySet:
    """Index i of a group's arrays holds the row whose stamp was `stamps[group, i]`, with `num_blocks[i]` blocks."""

    def __init__(self, tables: RowTables) -> None:
        self._source = tables
        num_groups, num_rows = tables.first_kept.shape
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._stamps = np.full((num_groups, num_rows), NO_STAMP, dtype=np.int64)
        self._first_blocks = np.zeros((num_groups, num_rows), dtype=np.int64)
        self._tables = [np.zeros((num_rows, 0), dtype=np.int64)] * num_groups

    def gather(self, rows: np.ndarray) -> list[GroupTables]:
        source, count = self._source, len(rows)
        num_blocks = source.num_blocks[rows]
        first_kept = source.first_kept.take(rows, axis=1)  # [num_groups, R]
        for group, needed in enumerate(np.maximum.reduce(num_blocks - first_kept, axis=1).tolist()):
            width = _roomy(needed)
            if self._tables[group].shape[1] != width:
                self._tables[group] = np.empty((len(self._num_blocks), width), dtype=np.int64)
                self._stamps[group] = NO_STAMP
        stamps = source.stamps.take(rows, axis=1)
        growth = num_blocks - self._num_blocks[:count]
        grown = (growth == 1).nonzero()[0]
        is_stale = (stamps != self._stamps[:, :count]) | (growth > 1)  # [num_groups, R]
        self._first_blocks[:, :count] = first_kept
        grown_rows, last_blocks = rows[grown], num_blocks[grown] - 1
        for group, table in enumerate(self._tables):
            # This writes too much where the index is stale as well, but there `_copy` then writes the whole table.
            columns = last_blocks - first_kept[group, grown]
            table[grown, columns] = source.pages[group, grown_rows, last_blocks]
            self._copy(group, rows, is_stale[group].nonzero()[0])
        self._num_blocks[:count] = num_blocks
        self._stamps[:, :count] = stamps
        return [
            GroupTables(table[:count], first[:count])
            for table, first in zip(self._tables, self._first_blocks, strict=True)
        ]

    def _copy(self, group: int, rows: np.ndarray, indices: np.ndarray) -> None:
        """Write the whole table of these indices (int64)."""
        if not len(indices):
            return
        source, target = self._source.pages[group], self._tables[group]
        width, max_blocks = target.shape[1], source.shape[1]
        copied, first = rows[indices], self._first_blocks[group, indices]
        if width <= max_blocks and not np.count_nonzero(first):
            target[indices] = source[copied, :width]
            return
        columns = first[:, None] + np.arange(width)
        pages = source[copied[:, None], np.minimum(columns, max_blocks - 1)]
        if columns[:, -1].max() >= max_blocks:
            pages[columns >= max_blocks] = NULL_PAGE
        target[indices] = pages


def _roomy(num_blocks: int) -> int:
    """How many columns to give a table of `num_blocks` blocks: that number, rounded up by fewer than 8 or by at most an
    eighth. So a growing context rarely needs new arrays, and a device is sent little more than the scheduled rows
    need."""
    step = max(8, 1 << max(0, num_blocks.bit_length() - 4))
    return -(-num_blocks // step) * step
