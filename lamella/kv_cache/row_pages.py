"""Which pages each row has, and where it gets more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.step_pages import StepPages


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
        skips_prompts: bool = False,
        step_pages_bytes: int = 0,
    ) -> None:
        self.layout = layout
        self.page_tokens = layout.page_tokens
        self.interval_tokens = interval_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.retention = RetentionPolicy() if retention is None else retention
        # Blocks below its windows that a row leaves in the tree for the resume point at its end.
        self.num_blocks_more = self.retention.num_blocks_more if enable_prefix_caching else 0
        self.windowed_replay = windowed_replay
        self.skips_prompts = skips_prompts
        self.replay = ReplayRule(layout)
        self.max_replay_tokens = max_model_len  # whoever knows the largest chunk sets this to it
        self.num_groups = len(layout.groups)
        self._num_slabs, self._slab_quota, self._step_pages_bytes = num_slabs, slab_quota, step_pages_bytes
        self._num_rows, self._max_blocks = num_rows, ceil_div(max_model_len, self.page_tokens)
        self._first_step_page = StepPages(layout, num_slabs, step_pages_bytes).first_page
        self._next_stamp = 0
        self.num_slab_moves = self.num_moved_pages = 0
        self.peak_owned = [0] * self.num_groups
        self._begin_empty(None)

    def clear(self) -> None:
        """Begin anew, with all rows and the cache empty, whatever state an exception left behind. Totals go on, and so
        do stamps. If it is interrupted, it is to be called again before anything else."""
        self._begin_empty(self.tree)

    def _begin_empty(self, before: PrefixTree | None) -> None:
        """before: the tree whose totals go on."""
        self.arena = Arena(self.layout, self._num_slabs, slab_quota=self._slab_quota)
        self.step_pages = StepPages(self.layout, self._num_slabs, self._step_pages_bytes)
        # Row -> its step pages: (group, first block, block after the last). For the time of a step.
        self.step_blocks: dict[int, list[tuple[int, int, int]]] = {}
        # Row -> pages per group that it took for the step alone, because memory was idle.
        self.num_passing: dict[int, list[int]] = {}
        tree = PrefixTree(
            tuple(group.spec for group in self.layout.groups),
            page_tokens=self.page_tokens,
            free_page=self.arena.free,
            keep_spare=self.enable_prefix_caching and self.retention.keeps_spare,
        )
        if before is not None:
            tree.continue_totals(before)
        self.tree = tree
        num_rows, max_blocks = self._num_rows, self._max_blocks
        self.tables = np.full((self.num_groups, num_rows, max_blocks), NULL_PAGE, dtype=np.int64)
        self.nodes = np.full((num_rows, max_blocks), NO_NODE, dtype=np.int64)
        self.first_kept = np.zeros((self.num_groups, num_rows), dtype=np.int64)  # in blocks
        # Blocks from here up to first_kept are left for the row's end: what the tree still has of them then is kept.
        self.first_left = np.zeros((self.num_groups, num_rows), dtype=np.int64)
        # A new number when entries of the row's table or its first_kept change, new blocks excepted: those num_blocks
        # tells. No two rows ever have the same, so that who keeps a copy of a table knows whether it is still right.
        first_stamp = self._next_stamp
        self._next_stamp = first_stamp + self.num_groups * num_rows
        self.table_stamps = np.arange(first_stamp, self._next_stamp, dtype=np.int64).reshape(self.num_groups, num_rows)
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
        self._first_left_at = [rows.data for rows in self.first_left]
        self._stamps_at = [rows.data for rows in self.table_stamps]
        self._num_blocks_at, self._num_committed_at = self.num_blocks.data, self.num_committed.data
        self._num_settled_at, self._frontier_at = self.num_settled.data, self.frontier.data
        self._junction_at, self._prompt_tail_at = self._junction.data, self._prompt_tail.data
        # Row -> its planned copies (group, source node, target page). The source is locked meanwhile.
        self.copies: dict[int, list[tuple[int, int, int]]] = {}
        # What compaction moved since the last step, in its order. To copy before anything else.
        self.moves: list[MovedPages] = []
        # A step is planned that is not processed yet: nothing moves, and pages that it may read are not freed.
        self.in_flight = False
        self.given_up: list[tuple[int, int]] = []  # (group, page), free when the step in flight is processed
        self.num_owned = [0] * self.num_groups

    def _slide(self, row: int, position: int, end_position: int, *, at_once: bool) -> None:
        """Let go what nothing needs that resumes at `position` or later, when an interval of it has gathered, or
        `at_once`; of that, leave for the row's end what one needs that resumes at end_position."""
        for group in self.tree.windowed_groups:
            first = self.tree.specs[group].first_needed(position)
            kept = self._first_kept_at[group][row]
            lag_tokens = first - kept * self.page_tokens
            if lag_tokens < self.page_tokens or not (at_once or lag_tokens >= self.interval_tokens):
                continue
            new_first = first // self.page_tokens
            self._leave_for_end(group, row, new_first, self.tree.specs[group].first_needed(end_position))
            for block in range(kept, min(new_first, self._num_blocks_at[row])):
                self._release_block(group, row, block)
            self._first_kept_at[group][row] = new_first
            self._stamp(group, row)

    def _leave_for_end(self, group: int, row: int, new_first: int, end_first: int) -> None:
        """The row's blocks below `new_first` are about to slide: leave those that have tokens from `end_first` on for
        its end, and what was left before no more."""
        tree, nodes, kept = self.tree, self._nodes_at[row], self._first_kept_at[group][row]
        left, first = self._first_left_at[group][row], end_first // self.page_tokens
        if nodes[new_first - 1] == NO_NODE:  # it slides past what the tree does not have
            first = new_first
        for block in range(max(first, kept), new_first):
            tree.want_for_end(group, nodes[block])
        for block in range(left, min(first, kept)):
            tree.unwant_for_end(group, nodes[block])
        self._first_left_at[group][row] = max(left, min(first, new_first))

    def _leave_nothing(self, row: int) -> None:
        nodes = self._nodes_at[row]
        for group in self.tree.windowed_groups:
            kept = self._first_kept_at[group][row]
            for block in range(self._first_left_at[group][row], kept):
                self.tree.unwant_for_end(group, nodes[block])
            self._first_left_at[group][row] = kept

    def _extend(self, row: int, num_blocks: int) -> bool:
        """Own private pages for the blocks up to `num_blocks`, in every group, or in none."""
        old = self._num_blocks_at[row]
        if num_blocks <= old:
            return True
        if num_blocks - old > 1 or not self._own_block(row, old):
            spans = [(group, max(old, kept[row]), num_blocks) for group, kept in enumerate(self._first_kept_at)]
            if not self._own_pages(row, spans):
                return False
        self._num_blocks_at[row] = num_blocks
        return True

    def _extend_for_chunk(self, row: int, num_computed: int, end: int) -> bool:
        """`_extend` for the tokens [num_computed, end). Windowed blocks that only this step needs get step pages, as
        far as there are any, unless so much memory idles that pages for all drive nothing out of the cache that is
        kept on purpose: such pages serve as cache afterwards."""
        num_blocks = ceil_div(end, self.page_tokens)
        passing = self._passing_blocks(row, num_computed, end)
        if not passing:
            return self._extend(row, num_blocks)
        if self._fits_into_idle_memory(row, num_blocks) and self._give_chunk(row, num_blocks, passing, []):
            return True
        given = [
            (group, first, self.step_pages.take(group, min(last - first, self.step_pages.num_left(group))))
            for group, first, last in passing
        ]
        if self._give_chunk(row, num_blocks, passing, given):
            return True
        for group, _, pages in given:
            self.step_pages.give_back(group, len(pages))
        return False

    def _give_chunk(
        self,
        row: int,
        num_blocks: int,
        passing: Sequence[tuple[int, int, int]],
        given: Sequence[tuple[int, int, list[int]]],
    ) -> bool:
        """Put the step pages `given` (group, first block, pages) into the row's tables and own pages for its other
        blocks up to `num_blocks`, or do nothing."""
        old = self._num_blocks_at[row]
        spans = []
        for group, kept in enumerate(self._first_kept_at):
            start = max(old, kept[row])
            for owner, first, pages in given:
                if owner == group and pages:
                    spans.append((group, start, first))
                    start = first + len(pages)
            spans.append((group, start, num_blocks))
        if not self._own_pages(row, [span for span in spans if span[1] < span[2]]):
            return False
        self._num_blocks_at[row] = num_blocks
        num_passing = [0] * self.num_groups
        for group, first, last in passing:
            num_passing[group] += last - first
        for group, first, pages in given:
            if pages:
                self.tables[group, row, first : first + len(pages)] = pages
                self.step_blocks.setdefault(row, []).append((group, first, first + len(pages)))
                num_passing[group] -= len(pages)
        self.num_passing[row] = num_passing
        return True

    def _passing_blocks(self, row: int, num_computed: int, end: int) -> list[tuple[int, int, int]]:
        """(group, first block, block after the last) of what the chunk [num_computed, end) writes and nobody needs
        after the step: all but the windows at the chunk's end and where a resume point will be, each with a block
        more (see `_add_resume_point`)."""
        page_tokens, old = self.page_tokens, self._num_blocks_at[row]
        ends = [end // page_tokens * page_tokens]
        if num_computed < self._junction_at[row] < ends[0]:
            ends.append(self._junction_at[row])
        if self.retention.keeps_block_ends and self.enable_prefix_caching:
            blocks = range(num_computed // page_tokens + 1, end // page_tokens)
            block_ends = (block * page_tokens for block in blocks)
            ends += [one for one in block_ends if self.retention.keeps_block_end(one, page_tokens)]
        ends.sort()
        passing = []
        for group in self.tree.windowed_groups:
            start = max(old, self._first_kept_at[group][row])
            for kept_end in ends:
                kept = self.tree.specs[group].first_needed(max(0, kept_end - page_tokens)) // page_tokens
                if start < kept:
                    passing.append((group, start, kept))
                start = max(start, kept_end // page_tokens)
        return passing

    def _needs_step_pages(self, row: int, num_computed: int, end: int) -> bool:
        """Whether blocks of the chunk [num_computed, end) should have step pages: nobody needs them later, and little
        memory idles."""
        if not self.step_pages.num_tokens or not self._passing_blocks(row, num_computed, end):
            return False
        return not self._fits_into_idle_memory(row, ceil_div(end, self.page_tokens))

    def _fits_into_idle_memory(self, row: int, num_blocks: int) -> bool:
        old = self._num_blocks_at[row]
        num_bytes = sum(
            (num_blocks - max(old, kept[row])) * group.page_bytes
            for group, kept in zip(self.layout.groups, self._first_kept_at, strict=True)
        )
        return num_bytes <= self.idle_bytes()

    def idle_bytes(self) -> int:
        """Memory that is free, or of pages that are spare or for an end."""
        groups, tree = self.layout.groups, self.tree
        if not tree.windowed_groups:
            return 0
        total_bytes = (self.arena.num_slabs - 1) * self.layout.slab_bytes
        used_bytes = sum(used * group.page_bytes for used, group in zip(self.arena.num_used, groups, strict=True))
        num_unkept = len(tree.spare) + len(tree.for_ends)
        return total_bytes - used_bytes + num_unkept * min(groups[one].page_bytes for one in tree.windowed_groups)

    def _drop_step_pages(self, row: int) -> None:
        """The step has run, or the row is not in it after all."""
        self.num_passing.pop(row, None)
        for group, first, last in self.step_blocks.pop(row, ()):
            self.tables[group, row, first:last] = NULL_PAGE
            self._stamp(group, row)
        if not self.step_blocks:
            self.step_pages.reset()

    def _own_block(self, row: int, block: int) -> bool:
        """Own a private page for one block in every group, if there are any without evictions: the quick case."""
        taken: list[int] = []
        for group, pages in enumerate(self._pages_at):
            page = self.arena.allocate_one(group, pages[row][block - 1] if block else NULL_PAGE)
            if page == NULL_PAGE:
                for owner, given in enumerate(taken):
                    self.arena.free(owner, given)
                return False
            taken.append(page)
        for group, page in enumerate(taken):
            self._pages_at[group][row][block] = page
            self._count_owned(group, 1)
        return True

    def _own_pages(self, row: int, spans: Sequence[tuple[int, int, int]]) -> bool:
        """Own private pages for the blocks from start to end, for each (group, start, end), or for none of them."""
        taken: list[tuple[int, int, list[int]]] = []
        for group, start, end in spans:
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
                self.tables[group, row, start : start + len(pages)] = pages
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
        """Spare pages go first, then what is for the ends of running requests, then resume points.

        Where slabs cannot move, full pages are of no use to a windowed group: windows go alone, if they can be
        replayed."""
        if not self.tree.spare and self.tree.evict_for_end():
            return True
        if self.windowed_replay and self.arena.slab_quota is not None and self.tree.specs[group].is_windowed:
            return self.tree.strip_one(self._can_be_replayed) or self.tree.evict_one()
        return self.tree.evict_one()

    def _can_be_replayed(self, num_tokens: int) -> bool:
        return self.replay.plan(num_tokens, 0, self.max_replay_tokens) is not None

    def _compact(self, group: int, in_hand: Sequence[tuple[int, int, list[int]]]) -> bool:
        """Move pages of other groups together so that a slab comes free for `group`; whether that can be done.

        in_hand: (group, start, pages) that are allocated but in no table yet.
        """
        if self.in_flight or not self.arena.can_compact(group):
            return False
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
        if page >= self._first_step_page:
            return
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
