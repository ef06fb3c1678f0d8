"""What to write into a copy of the rows' block tables: the entries that have changed since it was last brought up to
date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.step_memory import NO_STAMP, GroupPlan, TableVersions

UNKNOWN_PAGE = -2  # differs from every page that a table can have


class TableChanges(NamedTuple):
    """Entries to write, each once: for each its place among the entries of all tables, and the page to write there."""

    places: np.ndarray  # int64 [n]
    pages: np.ndarray  # int64 [n]


class TableCopy:
    """Keeps track of a copy of the block tables that lies elsewhere, by row, and says what to write into it.

    A group's table has a line of `widths[group]` entries for each row. Block b of the row is in column b % width, so
    nothing has to move when a window slides: an entry that has left the window is overwritten by the one that comes a
    width later. The entries of all groups lie one after the other. At first all are NULL_PAGE.

    Only changes cost time. A new block is one entry. A row whose stamp has changed is compared with the copy entry by
    entry. For every other row two numbers are compared.

    `changes` and `wrote` go together. If `changes` was not followed by `wrote`, the copy may or may not have been
    written; then the next `changes` takes all entries of the copy for unknown.
    """

    def __init__(self, num_rows: int, widths: Sequence[int]) -> None:
        self.num_rows, self.widths = num_rows, tuple(widths)
        self.num_entries = num_rows * sum(widths)
        self._begins = [num_rows * sum(widths[:group]) for group in range(len(widths))]
        self._entries = np.full(self.num_entries, NULL_PAGE, dtype=np.int64)
        self._stamps = np.full((len(widths), num_rows), NO_STAMP, dtype=np.int64)
        self._num_blocks = np.zeros((len(widths), num_rows), dtype=np.int64)  # of each row, how many the copy has
        self._is_exact = True

    def changes(self, groups: Sequence[GroupPlan], versions: TableVersions, num_blocks: np.ndarray) -> TableChanges:
        """The entries of these tables that the copy lacks, from each row's first block up to num_blocks (int64 [R], not
        included). The copy must have enough rows and columns (see `needs`). After `wrote` they count as written."""
        if not self._is_exact:
            self._entries[:] = UNKNOWN_PAGE
            self._stamps[:] = NO_STAMP
        self._is_exact = False
        rows = versions.rows
        is_stale = versions.stamps != self._stamps.take(rows, axis=1)
        is_stale |= versions.stamps == NO_STAMP
        known_blocks = self._num_blocks.take(rows, axis=1)
        lacks = is_stale | (known_blocks < num_blocks)
        parts = [
            self._group_changes(group, part, rows, is_stale[group], known_blocks[group], num_blocks)
            for group, part in enumerate(groups)
            if lacks[group].any()
        ]
        self._num_blocks[:, rows] = np.where(is_stale, num_blocks, np.maximum(known_blocks, num_blocks))
        self._stamps[:, rows] = versions.stamps
        if not parts:
            return TableChanges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        return TableChanges(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def wrote(self) -> None:
        """The last changes are written, or will be before anyone reads the copy."""
        self._is_exact = True

    def _group_changes(
        self,
        group: int,
        part: GroupPlan,
        rows: np.ndarray,
        is_stale: np.ndarray,
        known_blocks: np.ndarray,
        num_blocks: np.ndarray,
    ) -> TableChanges:
        begins = np.where(is_stale, part.first_blocks, np.maximum(known_blocks, part.first_blocks))
        counts = np.maximum(num_blocks - begins, 0)
        requests = np.repeat(np.arange(len(rows)), counts)
        blocks = np.arange(len(requests)) - (np.cumsum(counts) - counts)[requests] + begins[requests]
        pages = part.block_tables[requests, blocks - part.first_blocks[requests]]
        width = self.widths[group]
        places = self._begins[group] + rows[requests] * width + blocks % width
        differs = self._entries[places] != pages
        places, pages = places[differs], pages[differs]
        self._entries[places] = pages
        return TableChanges(places, pages)


def needs(
    groups: Sequence[GroupPlan], versions: TableVersions, num_blocks: np.ndarray, is_windowed: Sequence[bool]
) -> tuple[int, list[int]]:
    """(number of rows, width of each group) that a copy must have at least for a plan. In a full group a line must have
    room for all blocks of a row; in a windowed group, for those from the row's first block on."""
    widths = [
        int((num_blocks - part.first_blocks if windowed else num_blocks).max(initial=0))
        for part, windowed in zip(groups, is_windowed, strict=True)
    ]
    return int(versions.rows.max(initial=-1)) + 1, widths
