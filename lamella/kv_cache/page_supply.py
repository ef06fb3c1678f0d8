"""Where rows get their pages, and where pages go that a row lets go.

    free in the arena ──own──▶ private to a row ──give_page (RowCommits)──▶ in the tree, locked by the row
           ▲                        │                                              │
           └────────release─────────┴──────── the tree lets go ◀──────unlock───────┘

Pages for a row come from free memory; if that is not enough, from compaction (moving pages together); then from
eviction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageCopies, PageMoves
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings

_NO_PAGES = np.zeros(0, dtype=np.int64)

Span = tuple[int, int, int]  # (group, first block, block after the last)


class PageSupply:
    """Gives pages of `arena` to rows and takes them back, and keeps the rows' tables up to date. Pages in `tree` are
    cached; rows share them by locks.

    first_step_page: all pages of the arena have smaller ids. Pages from here on are step pages, which are not freed
    here.
    """

    def __init__(
        self,
        layout: KVLayout,
        settings: CacheSettings,
        replay: ReplayRule,
        rows: RowTables,
        tree: PrefixTree,
        arena: Arena,
        *,
        first_step_page: int,
    ) -> None:
        self.arena = arena
        self._layout, self._replay = layout, replay
        self._rows, self._tree = rows, tree
        self._num_groups = len(layout.groups)
        self._first_step_page = first_step_page
        # In fixed pools a full page that is let go is of no use to a windowed group (see `evict_for`).
        strips_windows = settings.windowed_replay and settings.slab_quota is not None
        self._strips_windows = [strips_windows and group.spec.is_windowed for group in layout.groups]
        # Row -> its planned copies (group, source node, target page). The source stays locked until they have run.
        self.copies: dict[int, list[tuple[int, int, int]]] = {}
        # What compaction has moved since the last step, oldest first: the next step copies it before anything else.
        self.moves: list[PageMoves] = []
        # Whether a planned step is not processed yet. While so, nothing moves, and no page that it may read is freed.
        self.in_flight = False
        self.given_up: list[tuple[int, int]] = []  # (group, page): become free when the step in flight is processed
        self.num_owned = [0] * self._num_groups
        self.peak_owned = [0] * self._num_groups
        self.num_slab_moves = self.num_moved_pages = 0

    def continue_totals(self, before: PageSupply) -> None:
        """Go on with the totals of `before`, which this one replaces."""
        self.peak_owned = before.peak_owned
        self.num_slab_moves, self.num_moved_pages = before.num_slab_moves, before.num_moved_pages

    # Taking

    def extend(self, row: int, num_blocks: int) -> bool:
        """Own private pages for the row's blocks up to `num_blocks`, in every group. Moves and evicts as needed. False,
        and nothing changed but that, when there is no memory."""
        rows = self._rows
        old = rows.num_blocks_at[row]
        if num_blocks <= old:
            return True
        if num_blocks - old > 1 or not self._own_block(row, old):
            spans = [(group, max(old, kept[row]), num_blocks) for group, kept in enumerate(rows.first_kept_at)]
            if not self.own_pages(row, spans):
                return False
        rows.num_blocks_at[row] = num_blocks
        return True

    def _own_block(self, row: int, block: int) -> bool:
        """The quick case: own a private page for one block in every group, if there are free ones. Else False, and
        nothing changed."""
        taken: list[int] = []
        for group, pages in enumerate(self._rows.pages_at):
            page = self.arena.allocate_one(group, pages[row][block - 1] if block else NULL_PAGE)
            if page == NULL_PAGE:
                for owner, given in enumerate(taken):
                    self.arena.free(owner, given)
                return False
            taken.append(page)
        for group, page in enumerate(taken):
            self._rows.pages_at[group][row][block] = page
            self.count_owned(group, 1)
        return True

    def own_pages(self, row: int, spans: Sequence[Span]) -> bool:
        """Own private pages for the row's blocks of all spans, which have none yet. Moves and evicts as needed. False,
        and nothing changed but that, when there is no memory. The caller sets the row's `num_blocks`."""
        pages_at = self._rows.pages_at
        taken: list[tuple[int, int, list[int]]] = []
        for group, start, end in spans:
            near = pages_at[group][row][start - 1] if start else NULL_PAGE
            pages = self._allocate(group, end - start, near, taken)
            if pages is None:
                for owner, _, given in taken:
                    for page in given:
                        self.arena.free(owner, page)
                return False
            taken.append((group, start, pages))
        for group, start, pages in taken:
            if len(pages) == 1:
                pages_at[group][row][start] = pages[0]
            else:
                self._rows.pages[group, row, start : start + len(pages)] = pages
            self.count_owned(group, len(pages))
        return True

    def _allocate(
        self, group: int, count: int, near: int, in_hand: Sequence[tuple[int, int, list[int]]]
    ) -> list[int] | None:
        if count <= 0:
            return []
        while (pages := self.arena.allocate(group, count, near)) is None:
            if self.compact(group, in_hand):
                near = NULL_PAGE  # that page may have moved
            elif not self.evict_for(group):
                return None
        return pages

    def evict_for(self, group: int) -> bool:
        """Let one thing go so that `group` may get memory; False: there is nothing. Spare pages go first, then pages
        for the ends of running requests, then resume points.

        In fixed pools full pages are of no use to a windowed group. So there a resume point loses only its windows, if
        these can be replayed."""
        if not self._tree.spare and self._tree.evict_for_end():
            return True
        if self._strips_windows[group]:
            return self._tree.strip_one(self._can_be_replayed) or self._tree.evict_one()
        return self._tree.evict_one()

    def _can_be_replayed(self, num_tokens: int) -> bool:
        return self._replay.plan(num_tokens, 0) is not None

    def compact(self, group: int, in_hand: Sequence[tuple[int, int, list[int]]] = ()) -> bool:
        """Move pages of another group together so that a slab becomes free for `group`. False, and nothing changed,
        where that cannot be done. Tables and tree name the new places at once; `moves` tells the next step which
        contents to move.

        in_hand: (group, start, pages) that are allocated but in no table yet. They stay where they are, and so do
        targets of planned copies.
        """
        if self.in_flight or not self.arena.can_compact(group):
            return False
        immovable = [target for copies in self.copies.values() for _, _, target in copies]
        for _, _, pages in in_hand:
            immovable += pages
        moves = self.arena.compact(group, immovable=immovable)
        if moves is None:
            return False
        owner, sources, targets = moves.group, moves.src_pages, moves.dst_pages

        def follow(pages: np.ndarray) -> np.ndarray:
            at = np.minimum(np.searchsorted(sources, pages), len(sources) - 1)
            return np.where(sources[at] == pages, targets[at], pages)

        tables = self._rows
        rows = tables.in_use()
        width = int(tables.num_blocks[rows].max(initial=0))
        tables.pages[owner, rows, :width] = follow(tables.pages[owner, rows, :width])
        for row in rows.tolist():
            tables.stamp(owner, row)
        self._tree.page[owner] = follow(self._tree.page[owner])
        self.moves.append(moves)
        self.num_slab_moves += 1
        self.num_moved_pages += len(sources)
        return True

    def take_pages(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Take so many pages of each group for what is no row's, all or none. Moves and evicts as needed. None, and
        nothing changed but that, when there is no memory."""
        taken: list[tuple[int, int, list[int]]] = []
        for group, count in enumerate(counts):
            pages = self._allocate(group, count, NULL_PAGE, taken)
            if pages is None:
                self.give_pages_back([given for _, _, given in taken])
                return None
            taken.append((group, 0, pages))
        return [pages for _, _, pages in taken]

    def give_pages_back(self, taken: Sequence[Sequence[int]]) -> None:
        """Free what `take_pages` gave of the first groups."""
        for group, pages in enumerate(taken):
            for page in pages:
                self.arena.free(group, page)

    def take_moves(self) -> list[PageMoves]:
        """What compaction has moved and no step has yet copied: the caller copies it now, and the next step does not.
        While a step is in flight there is nothing, because it does so first."""
        moves: list[PageMoves] = []
        if not self.in_flight:
            moves, self.moves[:] = list(self.moves), []
        return moves

    # Letting go

    def release_block(self, group: int, row: int, block: int) -> None:
        """Take the row's page for the block, if it has one, out of its table. A private page becomes free; a page of
        the tree is unlocked; a step page is left to ChunkPages, which gives it back. The caller stamps the row."""
        rows = self._rows
        page = rows.pages_at[group][row][block]
        if page == NULL_PAGE:
            return
        rows.pages_at[group][row][block] = NULL_PAGE
        if page >= self._first_step_page:
            return
        node = rows.nodes_at[row][block]
        if node == NO_NODE or block < rows.scratch_end_at[group][row]:
            self.arena.free(group, page)
            self.count_owned(group, -1)
        else:
            self.unlock(group, node)

    def give_up(self, group: int, page: int) -> None:
        """Free a private page that a row does not need, because the tree has another one with the same contents. A step
        in flight may still read it; then it becomes free when that step is processed. The caller calls `count_owned`.
        """
        if self.in_flight:
            self.given_up.append((group, page))
        else:
            self.arena.free(group, page)

    def lock(self, group: int, node: int) -> int:
        """A row uses the node's page of `group` from now on. Returns the page."""
        self.count_owned(group, +int(self._tree.refs_at[group][node] == 0))
        return self._tree.lock(group, node)

    def lock_all(self, group: int, nodes: Sequence[int]) -> list[int]:
        """`lock` each node of a path. Returns their pages."""
        refs, lock = self._tree.refs_at[group], self._tree.lock
        self.count_owned(group, [refs[node] for node in nodes].count(0))
        return [lock(group, node) for node in nodes]

    def unlock(self, group: int, node: int) -> None:
        """A row does not use the node's page of `group` any more."""
        self.count_owned(group, -(self._tree.refs_at[group][node] == 1))
        self._tree.unlock(group, node)

    def count_owned(self, group: int, change: int) -> None:
        """The number of pages that are private, or in the tree and used by a row, changes by `change`."""
        self.num_owned[group] = now = self.num_owned[group] + change
        if now > self.peak_owned[group]:
            self.peak_owned[group] = now

    # What a step has to do first

    def plan_tail_copy(self, row: int, source: int, block: int) -> bool:
        """Own a page for the row's `block` in every group, and plan to copy the pages of the node `source` there. The
        source stays locked until the copy has run. False, and nothing changed but evictions and moves, when there is no
        memory."""
        for group in range(self._num_groups):
            self.lock(group, source)
        if not self.extend(row, block + 1):
            for group in range(self._num_groups):
                self.unlock(group, source)
            return False
        self.copies[row] = [(group, source, pages[row][block]) for group, pages in enumerate(self._rows.pages_at)]
        return True

    def drop_copies(self, row: int) -> None:
        """The row's copies have run, or must not run any more."""
        for group, source, _ in self.copies.pop(row, ()):
            self.unlock(group, source)

    def planned_copies(self) -> list[PageCopies]:
        """Per group, what to copy before the next step. While a step is in flight there is nothing, because all planned
        copies are that step's."""
        if not self.copies or self.in_flight:
            return [PageCopies(_NO_PAGES, _NO_PAGES)] * self._num_groups
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self._num_groups)]
        for copies in self.copies.values():
            for group, source, target in copies:
                pairs[group].append((self._tree.page_at[group][source], target))
        arrays = (np.array(one, dtype=np.int64).reshape(-1, 2) for one in pairs)
        return [PageCopies(array[:, 0], array[:, 1]) for array in arrays]

    def free_given_up(self) -> None:
        """No step in flight reads what was given up."""
        for group, page in self.given_up:
            self.arena.free(group, page)
        self.given_up.clear()

    # How much there is

    def idle_bytes(self) -> int:
        """Bytes that are free, and those of pages that are spare or for an end. 0 without windowed groups."""
        groups, tree = self._layout.groups, self._tree
        if not tree.windowed_groups:
            return 0
        used_bytes = sum(used * group.page_bytes for used, group in zip(self.arena.num_used, groups, strict=True))
        num_unkept = len(tree.spare) + len(tree.for_ends)
        unkept_bytes = num_unkept * min(groups[one].page_bytes for one in tree.windowed_groups)
        return self.total_bytes - used_bytes + unkept_bytes

    @property
    def total_bytes(self) -> int:
        """The most bytes that the arena lends, the null slab not included."""
        return (self.arena.num_slabs - 1) * self._layout.slab_bytes
