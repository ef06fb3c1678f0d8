"""Which entries of the rows' block tables a copy lacks: what changed since the last plan that it took in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.step_memory import NO_STAMP, GroupPlan, TableVersions

UNKNOWN_PAGE = -2  # not what any table has


class TableChanges(NamedTuple):
    """Entries to write, each once: its place among the entries of all tables, and its page."""

    places: np.ndarray  # int64 [n]
    pages: np.ndarray  # int64 [n]


class TableCopy:
    """Says what to write into a copy of the block tables that is kept elsewhere, by row, and what is in it already.

    A group's table has a line of `widths[group]` entries for each row; block b of the row is in column b % width. So a
    window slides without moving anything: what left it is written over by what comes a width later. The entries of all
    groups lie one after the other. At first all are NULL_PAGE.

    A change is an event: a new block is one entry; a row whose stamp changed is compared entry by entry with what the
    copy has. Other rows cost a comparison of numbers. `changes` and `wrote` go together: where the first was not
    followed by the second, the copy may or may not have been written, and its entries are all taken for unknown.
    """

    def __init__(self, num_rows: int, widths: Sequence[int]) -> None:
        self.num_rows, self.widths = num_rows, tuple(widths)
        self.num_entries = num_rows * sum(widths)
        self._begins = [num_rows * sum(widths[:group]) for group in range(len(widths))]
        self._entries = np.full(self.num_entries, NULL_PAGE, dtype=np.int64)
        self._stamps = np.full((len(widths), num_rows), NO_STAMP, dtype=np.int64)
        self._num_blocks = np.zeros((len(widths), num_rows), dtype=np.int64)  # of each row, up to the last in the copy
        self._is_exact = True

    def changes(self, groups: Sequence[GroupPlan], versions: TableVersions, num_blocks: np.ndarray) -> TableChanges:
        """What the copy lacks of these tables, from each row's first block up to num_blocks (int64 [R], not included).
        The rows and widths must suffice (see `needs`). After `wrote` they are in the copy."""
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
    """(rows, width of each group) that a copy must have at least for a plan: of a group without windows, a line has
    all blocks of a row."""
    widths = [
        int((num_blocks - part.first_blocks if windowed else num_blocks).max(initial=0))
        for part, windowed in zip(groups, is_windowed, strict=True)
    ]
    return int(versions.rows.max(initial=-1)) + 1, widths
