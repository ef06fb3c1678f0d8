"""Which pages each row has, and where it gets more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.prefix_tree import NO_NODE, PrefixTree
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.spec import ceil_div


class MovedPages(NamedTuple):
    """Contents that compaction moves: page sources[i] of `group` -> targets[i]. int64 [n] each; disjoint."""

    group: int
    sources: np.ndarray
    targets: np.ndarray


class RowPages:
    """The arrays of a block manager, see HybridBlockManager, and what takes pages into them and out of them.

    Whoever changes an entry of a table calls `_stamp` for its row.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_slabs: int,
        num_rows: int,
        max_model_len: int,
        interval_tokens: int,
        enable_prefix_caching: bool = True,
        retention: RetentionPolicy | None = None,
        slab_quota: tuple[int, ...] | None = None,
        windowed_replay: bool = True,
    ) -> None:
        self.layout = layout
        self.page_tokens = layout.page_tokens
        self.interval_tokens = interval_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.retention = RetentionPolicy() if retention is None else retention
        self.arena = Arena(layout, num_slabs, slab_quota=slab_quota)
        specs = tuple(group.spec for group in layout.groups)
        self.tree = PrefixTree(
            specs,
            page_tokens=self.page_tokens,
            free_page=self.arena.free,
            keep_spare=enable_prefix_caching and self.retention.keeps_spare,
        )
        self.num_groups = len(specs)
        max_blocks = ceil_div(max_model_len, self.page_tokens)
        self.tables = np.full((self.num_groups, num_rows, max_blocks), NULL_PAGE, dtype=np.int64)
        self.nodes = np.full((num_rows, max_blocks), NO_NODE, dtype=np.int64)
        self.first_kept = np.zeros((self.num_groups, num_rows), dtype=np.int64)  # in blocks
        # A new number when entries of the row's table or its first_kept change, new blocks excepted: those num_blocks
        # tells. No two rows ever have the same, so that who keeps a copy of a table knows whether it is still right.
        self.table_stamps = np.arange(self.num_groups * num_rows, dtype=np.int64).reshape(self.num_groups, num_rows)
        self._next_stamp = self.table_stamps.size
        self.windowed_replay = windowed_replay
        self.replay = ReplayRule(layout)
        self.max_replay_tokens = max_model_len  # whoever knows the largest chunk sets this to it
        self.replaying: dict[int, int] = {}  # row -> the position from which on it computes as ever
        self.first_keys = np.zeros((self.num_groups, num_rows), dtype=np.int64)  # lowest key position that exists
        # Windowed pages of blocks below this belong to the row even where `nodes` names a node: they are inexact.
        self.scratch_end = np.zeros((self.num_groups, num_rows), dtype=np.int64)
        self._scratch_end_at = [rows.data for rows in self.scratch_end]
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.num_committed = np.zeros(num_rows, dtype=np.int64)  # in blocks
        self.num_settled = np.zeros(num_rows, dtype=np.int64)  # committed blocks whose contents are computed
        self.frontier = np.full(num_rows, NO_NODE, dtype=np.int64)  # pinned; NO_NODE: the row is empty
        self._junction = np.full(num_rows, -1, dtype=np.int64)  # block end where another prompt diverged
        self._resume_block = np.zeros(num_rows, dtype=np.int64)  # the first block that the row did not find
        self._prompt_tail = np.full(num_rows, -1, dtype=np.int64)  # end of the block that the prompt ends inside of
        # The same memory one item at a time: plain ints, several times faster than items of an array.
        self._pages_at = [[row.data for row in table] for table in self.tables]  # [group][row][block]
        self._nodes_at = [row.data for row in self.nodes]
        self._first_kept_at = [rows.data for rows in self.first_kept]
        self._stamps_at = [rows.data for rows in self.table_stamps]
        self._num_blocks_at, self._num_committed_at = self.num_blocks.data, self.num_committed.data
        self._num_settled_at, self._frontier_at = self.num_settled.data, self.frontier.data
        self._junction_at, self._prompt_tail_at = self._junction.data, self._prompt_tail.data
        # Row -> its planned copies (group, source node, target page). The source is locked meanwhile.
        self.copies: dict[int, list[tuple[int, int, int]]] = {}
        # What compaction moved since the last step, in its order. To copy before anything else.
        self.moves: list[MovedPages] = []
        self.num_slab_moves = self.num_moved_pages = 0
        self.num_owned = [0] * self.num_groups
        self.peak_owned = [0] * self.num_groups

    def _slide(self, row: int, num_computed: int, *, is_prefill: bool) -> None:
        for group in self.tree.windowed_groups:
            first = self.tree.specs[group].first_needed(num_computed)
            kept = self._first_kept_at[group][row]
            lag_tokens = first - kept * self.page_tokens
            if lag_tokens < self.page_tokens or not (is_prefill or lag_tokens >= self.interval_tokens):
                continue
            new_first = first // self.page_tokens
            for block in range(kept, min(new_first, self._num_blocks_at[row])):
                self._release_block(group, row, block)
            self._first_kept_at[group][row] = new_first
            self._stamp(group, row)

    def _extend(self, row: int, num_blocks: int) -> bool:
        """Own private pages for the blocks up to `num_blocks`, in every group, or in none."""
        old = self._num_blocks_at[row]
        if num_blocks <= old:
            return True
        starts = [max(old, first_kept[row]) for first_kept in self._first_kept_at]
        if not self._own_pages(row, list(enumerate(starts)), num_blocks):
            return False
        self._num_blocks_at[row] = num_blocks
        return True

    def _own_pages(self, row: int, starts: Sequence[tuple[int, int]], end: int) -> bool:
        """Own private pages for the blocks from start to `end`, for each (group, start), or for none of them."""
        taken: list[tuple[int, int, list[int]]] = []
        for group, start in starts:
            near = self._pages_at[group][row][start - 1] if start else NULL_PAGE
            pages = self._allocate(group, end - start, near, taken)
            if pages is None:
                for owner, _, given in taken:
                    for page in given:
                        self.arena.free(owner, page)
                return False
            taken.append((group, start, pages))
        for group, start, pages in taken:
            if len(pages) == 1:
                self._pages_at[group][row][start] = pages[0]
            else:
                self.tables[group, row, start:end] = pages
            self._count_owned(group, len(pages))
        return True

    def _allocate(
        self, group: int, count: int, near: int, in_hand: Sequence[tuple[int, int, list[int]]]
    ) -> list[int] | None:
        if count <= 0:
            return []
        while (pages := self.arena.allocate(group, count, near)) is None:
            if self._compact(group, in_hand):
                near = NULL_PAGE  # may have moved
            elif not self._evict_for(group):
                return None
        return pages

    def _evict_for(self, group: int) -> bool:
        """Where slabs cannot move, full pages are of no use to a windowed group: windows go alone, if they can be
        replayed."""
        if self.windowed_replay and self.arena.slab_quota is not None and self.tree.specs[group].is_windowed:
            return self.tree.strip_one(self._can_be_replayed) or self.tree.evict_one()
        return self.tree.evict_one()

    def _can_be_replayed(self, num_tokens: int) -> bool:
        return self.replay.plan(num_tokens, 0, self.max_replay_tokens) is not None

    def _compact(self, group: int, in_hand: Sequence[tuple[int, int, list[int]]]) -> bool:
        """Move pages of other groups together so that a slab comes free for `group`; whether that can be done.

        in_hand: (group, start, pages) that are allocated but in no table yet.
        """
        immovable = [target for copies in self.copies.values() for _, _, target in copies]
        for _, _, pages in in_hand:
            immovable += pages
        moves = self.arena.compact(group, immovable=immovable)
        if not moves:
            return False
        owner = moves[0].group
        moves.sort()  # by source
        sources = np.array([move.source for move in moves], dtype=np.int64)
        targets = np.array([move.target for move in moves], dtype=np.int64)

        def follow(pages: np.ndarray) -> np.ndarray:
            at = np.minimum(np.searchsorted(sources, pages), len(sources) - 1)
            return np.where(sources[at] == pages, targets[at], pages)

        rows = np.flatnonzero(self.frontier != NO_NODE)
        width = int(self.num_blocks[rows].max(initial=0))
        self.tables[owner, rows, :width] = follow(self.tables[owner, rows, :width])
        for row in rows.tolist():
            self._stamp(owner, row)
        self.tree.page[owner] = follow(self.tree.page[owner])
        self.moves.append(MovedPages(owner, sources, targets))
        self.num_slab_moves += 1
        self.num_moved_pages += len(moves)
        return True

    def _release_block(self, group: int, row: int, block: int) -> None:
        """The caller stamps the row."""
        page = self._pages_at[group][row][block]
        if page == NULL_PAGE:
            return
        self._pages_at[group][row][block] = NULL_PAGE
        node = self._nodes_at[row][block]
        if node == NO_NODE or block < self._scratch_end_at[group][row]:
            self.arena.free(group, page)
            self._count_owned(group, -1)
        else:
            self._unlock(group, node)

    def _unlock(self, group: int, node: int) -> None:
        self._count_owned(group, -(self.tree.refs_at[group][node] == 1))
        self.tree.unlock(group, node)

    def _unlock_copy_sources(self, row: int) -> None:
        for group, source, _ in self.copies.pop(row, ()):
            self._unlock(group, source)

    def _stamp(self, group: int, row: int) -> None:
        self._stamps_at[group][row] = self._next_stamp
        self._next_stamp += 1

    def _count_owned(self, group: int, change: int) -> None:
        self.num_owned[group] = now = self.num_owned[group] + change
        if now > self.peak_owned[group]:
            self.peak_owned[group] = now
