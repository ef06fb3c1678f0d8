"""Who holds which pages: one block table per group and running request, over the arena and the tree.

A request in a *row* owns what its row names, and nothing else:

    block          0 ...... first kept ............. commit frontier ........ blocks grown
    full group     [shared with or committed to the tree, locked ][ private            ]
    windowed       [ null, slid ][ committed to the tree, locked ][ private            ]

"Locked" blocks carry a node in `nodes`; their pages belong to the tree. Private blocks (node NO_NODE)
own their pages. Sliding and release treat both alike: unlock the node, or free the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.prefix_tree import NO_MATCH, NO_NODE, PrefixMatch, PrefixTree, Salt
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.spec import ceil_div

NOT_DUE = np.iinfo(np.int64).max
_NO_PAGES = np.zeros(0, dtype=np.int64)


class MovedPages(NamedTuple):
    """Contents that compaction moves: page sources[i] of `group` -> targets[i]. int64 [n] each; disjoint."""

    group: int
    sources: np.ndarray
    targets: np.ndarray


class GroupUsage(NamedTuple):
    """Pages of one group by state; they add up to the pages of the slabs lent to it."""

    owned: int  # private, or referenced by a request
    cached: int  # in the tree, nobody uses it now
    free: int


def _key(tokens: np.ndarray) -> bytes:
    """How the prefix tree knows a block."""
    return tokens.tobytes() if tokens.dtype == np.int32 else tokens.astype(np.int32).tobytes()


class HybridBlockManager:
    """Block tables of up to `num_rows` running requests of up to `max_model_len` tokens.

    interval_tokens: how many tokens must have left a window before decode slides it.
    windowed_replay: resume where only full-attention KV is cached, if that costs less than half (see `replay`).
    After each call the invariants of `invariants.check` hold.
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
        # lowest key position that exists, see DESIGN-free wording in docs/kv_cache.md
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
        self._scratch_end_at = [memoryview(rows) for rows in self.scratch_end]
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.num_committed = np.zeros(num_rows, dtype=np.int64)  # in blocks
        self.num_settled = np.zeros(num_rows, dtype=np.int64)  # committed blocks whose contents are computed
        self.frontier = np.full(num_rows, NO_NODE, dtype=np.int64)  # pinned; NO_NODE: the row is empty
        self._junction = np.full(num_rows, -1, dtype=np.int64)  # block end where another prompt diverged
        self._resume_block = np.zeros(num_rows, dtype=np.int64)  # the first block that the row did not find
        self._prompt_tail = np.full(num_rows, -1, dtype=np.int64)  # end of the block that the prompt ends inside of
        # The same memory one item at a time: plain ints, several times faster than items of an array.
        self._pages_at = [[memoryview(row) for row in table] for table in self.tables]  # [group][row][block]
        self._nodes_at = [memoryview(row) for row in self.nodes]
        self._first_kept_at = [memoryview(rows) for rows in self.first_kept]
        self._stamps_at = [memoryview(rows) for rows in self.table_stamps]
        self._num_blocks_at, self._num_committed_at = memoryview(self.num_blocks), memoryview(self.num_committed)
        self._num_settled_at, self._frontier_at = memoryview(self.num_settled), memoryview(self.frontier)
        self._junction_at, self._prompt_tail_at = memoryview(self._junction), memoryview(self._prompt_tail)
        # Row -> its planned copies (group, source node, target page). The source is locked meanwhile.
        self.copies: dict[int, list[tuple[int, int, int]]] = {}
        # What compaction moved since the last step, in its order. To copy before anything else.
        self.moves: list[MovedPages] = []
        self.num_slab_moves = self.num_moved_pages = 0
        self._keeps_block_ends = self.retention.name == "all" or self.retention.grid_tokens is not None
        self.num_owned = [0] * self.num_groups
        self.peak_owned = [0] * self.num_groups

    # Admission

    def match(self, token_ids: np.ndarray, salt: Salt = None) -> PrefixMatch:
        """What the cache has of this prompt (int32 [n]); at least its last token is left to compute."""
        if not self.enable_prefix_caching:
            return NO_MATCH
        match = self.tree.match(token_ids, salt, len(token_ids) - 1)
        if not self.windowed_replay:
            return match
        num_blocks = min(len(match.whole_path), (len(token_ids) - 1) // self.page_tokens)
        start = self.replay.plan(num_blocks * self.page_tokens, match.num_tokens, self.max_replay_tokens)
        if start is None:
            return match
        return match._replace(
            num_tokens=start,
            path=list(match.whole_path[:num_blocks]),
            tail_node=NO_NODE,
            num_replayed_tokens=num_blocks * self.page_tokens - start,
        )

    def expect(self, token_ids: np.ndarray, salt: Salt, rank: int) -> Expectation | None:
        """Keep what the cache has of a waiting request's prompt (int32 [n]) longer than what nobody waits for;
        None if it has nothing. rank: requests of lower rank run sooner. `settle` when it waits no more."""
        tree = self.tree
        if tree.windowed_groups and not self.retention.keeps_ends:
            return None
        match = self.match(token_ids, salt)
        if not match.num_tokens:
            return None
        path = match.path if match.tail_node == NO_NODE else [*match.path, match.tail_node]
        if not tree.pending.isdisjoint(path):
            return None  # the step that will compute it may fail
        held = []
        num_bytes = 0
        for group, spec in enumerate(tree.specs):
            if spec.is_windowed and match.num_replayed_tokens:
                continue
            if spec.is_windowed:
                first = min(spec.first_needed(match.num_tokens) // self.page_tokens, len(match.path))
                held += [(group, node) for node in path[first:]]
            else:  # what other prefixes and running requests share with it is there anyway
                shared = np.flatnonzero((tree.num_children[path] > 1) | (tree.refs[group, path] > 0))
                first = int(shared[-1]) + 1 if len(shared) else 0
            num_bytes += (len(path) - first) * self.layout.groups[group].page_bytes
        held += [one for one in tree.resume_points.get(path[-1], ()) if one not in held]
        tree.add_resume_point(path[-1], held)
        expectation = Expectation(path[-1], rank, match.num_tokens, num_bytes)
        tree.expected.add(expectation)
        return expectation

    def settle(self, expectation: Expectation) -> None:
        """The request waits no more."""
        self.tree.expected.settle(expectation)

    def begin(self, row: int, match: PrefixMatch, salt: Salt = None) -> bool:
        """Give an empty row the cached prefix of `match`: lock its nodes, own a copy of a partial block.

        Where the match is to be replayed, own the windowed pages of the tokens that are replayed.
        False, and nothing changed but evictions, when there is no memory for what the row must own.
        """
        assert self.frontier[row] == NO_NODE, f"row {row} is in use"
        tree = self.tree
        frontier = match.path[-1] if match.path else tree.root(salt)
        tree.pin(frontier)
        self.frontier[row] = frontier
        for group in range(self.num_groups):
            self._stamp(group, row)
        num_whole = len(match.path)
        self.nodes[row, :num_whole] = match.path
        self.num_blocks[row] = self.num_committed[row] = self.num_settled[row] = num_whole
        self._resume_block[row] = num_whole
        for group, spec in enumerate(tree.specs):
            first = min(spec.first_needed(match.num_tokens) // self.page_tokens, num_whole)
            if match.num_replayed_tokens and spec.is_windowed:
                first = num_whole
            self.first_kept[group, row] = first
            for block in range(first, num_whole):
                node = match.path[block]
                self._count_owned(group, +int(tree.refs[group, node] == 0))
                self.tables[group, row, block] = tree.lock(group, node)
        junction = match.num_structural_tokens // self.page_tokens * self.page_tokens
        self._junction[row] = junction if junction > match.num_tokens else -1
        if match.num_replayed_tokens and not self._begin_replay(row, match):
            self._drop_row(row)
            return False
        if match.tail_node != NO_NODE and not self._copy_tail(row, match):
            self._drop_row(row)
            return False
        tree.pass_by(match.path[:-1])
        tree.touch(frontier)
        tree.touch(match.tail_node)
        return True

    def _begin_replay(self, row: int, match: PrefixMatch) -> bool:
        """Own scratch pages for the windowed KV of the tokens that are replayed; the full KV is locked already."""
        start, end = match.num_tokens // self.page_tokens, len(match.path)
        taken: list[tuple[int, int, list[int]]] = []
        for group in self.tree.windowed_groups:
            pages = self._allocate(group, end - start, NULL_PAGE, taken)
            if pages is None:
                for owner, _, given in taken:
                    for page in given:
                        self.arena.free(owner, page)
                return False
            taken.append((group, start, pages))
        for group, _, pages in taken:
            self.tables[group, row, start:end] = pages
            self.first_kept[group, row] = start
            self.first_keys[group, row] = match.num_tokens
            self.scratch_end[group, row] = end
            self._count_owned(group, len(pages))
        self.num_settled[row] = end - 1  # so that `commit` is called when the replay is done
        self.replaying[row] = end * self.page_tokens
        return True

    def _end_replay(self, row: int) -> None:
        """The windows are computed: what is exact in them belongs to the tree, where it lacks it."""
        end = self.replaying.pop(row) // self.page_tokens
        tree = self.tree
        start = int(self.first_keys[tree.windowed_groups[0], row])
        for group, exact_from in enumerate(self.replay.exact_from(start)):
            if not tree.specs[group].is_windowed:
                continue
            first = min(end, ceil_div(exact_from, self.page_tokens))
            self.scratch_end[group, row] = first
            for block in range(max(first, self._first_kept_at[group][row]), end):
                self._give_page(group, row, block, self._nodes_at[row][block])
            self._stamp(group, row)

    def _copy_tail(self, row: int, match: PrefixMatch) -> bool:
        """Own the block that the hit ends in, in every group, and plan to copy its first part."""
        source = match.tail_node
        for group in range(self.num_groups):
            self._count_owned(group, +int(self.tree.refs[group, source] == 0))
            self.tree.lock(group, source)
        block = len(match.path)
        if not self._extend(row, block + 1):
            for group in range(self.num_groups):
                self._unlock(group, source)
            return False
        self.copies[row] = [(group, source, int(self.tables[group, row, block])) for group in range(self.num_groups)]
        return True

    def planned_copies(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per group (source pages, target pages) to copy before the next step; `end_step` when they have run."""
        if not self.copies:
            return [(_NO_PAGES, _NO_PAGES)] * self.num_groups
        per_group = []
        for group in range(self.num_groups):
            pairs = [
                (int(self.tree.page[group, source]), target)
                for copies in self.copies.values()
                for owner, source, target in copies
                if owner == group
            ]
            array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            per_group.append((array[:, 0], array[:, 1]))
        return per_group

    def _unlock_copy_sources(self, row: int) -> None:
        for group, source, _ in self.copies.pop(row, ()):
            self._unlock(group, source)

    # Growing and sliding

    def grow(self, row: int, num_computed: int, num_new: int, *, is_prefill: bool) -> bool:
        """Make room for the tokens [num_computed, num_computed + num_new), after sliding what no query
        from num_computed on can see. Evicts as needed. False: no memory; the row keeps what it had."""
        self._slide(row, num_computed, is_prefill=is_prefill)
        return self._extend(row, ceil_div(num_computed + num_new, self.page_tokens))

    def slide(self, row: int, num_computed: int) -> None:
        """Let go what no query from num_computed on can see, without waiting for the interval."""
        self._slide(row, num_computed, is_prefill=True)

    def next_due(self, row: int) -> int:
        """The position that needs `grow` before it is computed."""
        return self._num_blocks_at[row] * self.page_tokens

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
        taken: list[tuple[int, int, list[int]]] = []
        for group in range(self.num_groups):
            start = max(old, self._first_kept_at[group][row])
            near = self._pages_at[group][row][start - 1] if start else NULL_PAGE
            pages = self._allocate(group, num_blocks - start, near, taken)
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
                self.tables[group, row, start:num_blocks] = pages
            self._count_owned(group, len(pages))
        self._num_blocks_at[row] = num_blocks
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
        can_strip = self.windowed_replay and self.replay.is_possible and self.arena.slab_quota is not None
        if can_strip and self.tree.specs[group].is_windowed:
            return self.tree.strip_one() or self.tree.evict_one()
        return self.tree.evict_one()

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

    # Committing and releasing

    def is_replaying(self, row: int) -> bool:
        """Whether the row's next tokens are replayed: all before `replaying[row]` read full KV and do not write it."""
        return row in self.replaying

    def commit_ahead(self, row: int, token_ids: np.ndarray, num_tokens: int) -> None:
        """Enter the blocks that the step in preparation completes (those below `num_tokens`), as pending: a
        request admitted to the same step can share them. Stops at a block that the tree has already, for
        which `commit` decides once its contents are there.

        token_ids: int32 [>= num_tokens].
        """
        if not self.enable_prefix_caching:
            return
        tree, blocks = self.tree, self._blocks_of(row, token_ids, num_tokens)
        if blocks and tree.child(self._frontier_at[row], blocks[0]) == NO_NODE:
            tree.pending.update(self._commit_new_blocks(row, blocks))

    def commit(self, row: int, token_ids: np.ndarray, num_computed: int, *, ends_prompt: bool = False) -> None:
        """Enter the blocks that are complete at `num_computed` in the tree, and keep resume points.

        token_ids: int32 [>= num_computed]. ends_prompt: this step finished the prompt, so its end becomes a
        resume point.
        """
        if not self.enable_prefix_caching:
            return
        if self.is_replaying(row):
            if num_computed < self.replaying[row]:
                return
            self._end_replay(row)
        page_tokens = self.page_tokens
        complete = num_computed // page_tokens
        committed = self._num_committed_at[row]
        if complete - committed == 1:
            self._commit_block(row, committed, _key(token_ids[committed * page_tokens : complete * page_tokens]))
        elif complete > committed:
            self._commit_blocks(row, self._blocks_of(row, token_ids, num_computed))
        unsettled: Sequence[int] = range(self._num_settled_at[row], complete)
        if len(unsettled) > 2 and not self._keeps_block_ends:  # then only these two can matter
            ends = {self._prompt_tail_at[row], self._junction_at[row]}
            unsettled = sorted(end // page_tokens - 1 for end in ends if end // page_tokens - 1 in unsettled)
        for block in unsettled:
            self._settle_block(row, block)
        self._num_settled_at[row] = complete
        if ends_prompt:
            end = complete * page_tokens
            self._prompt_tail[row] = end + page_tokens if num_computed > end else -1
            if complete:
                self._add_resume_point(row, complete, since=end)
                self._pass_resume_points(row, complete - 1, token_ids)

    def _pass_resume_points(self, row: int, num_blocks: int, token_ids: np.ndarray) -> None:
        """The prompt's end is kept, so places to resume in its first `num_blocks` blocks are worth little."""
        tree, block = self.tree, self._resume_block[row]
        tree.pass_by(self.nodes[row, :num_blocks].tolist())
        if block < num_blocks:  # it resumed from a copy of a short block, which its own block covers
            parent = int(tree.parent[self.nodes[row, block]])
            tokens = token_ids[block * self.page_tokens : (block + 1) * self.page_tokens]
            tree.pass_by_short_blocks(parent, _key(tokens))

    def end_step(self) -> None:
        """The step has run: its copies are done and its pending blocks have their contents."""
        self.tree.pending.clear()
        self.moves.clear()
        for row in list(self.copies):
            self._unlock_copy_sources(row)

    def roll_back(self, row: int, num_computed: int) -> int:
        """The step in preparation failed: forget the blocks it was to complete, and its copies.

        A partial block goes too. Returns how many tokens the row still has computed. All rows of the failed
        step must be rolled back or released: they may share pending blocks.
        """
        self._unlock_copy_sources(row)
        complete = num_computed // self.page_tokens
        for block in range(int(self.num_blocks[row]) - 1, complete - 1, -1):
            for group in range(self.num_groups):
                self._release_block(group, row, block)
        frontier = node = int(self.frontier[row])
        for _ in range(int(self.num_committed[row]) - complete):
            node = int(self.tree.parent[node])
        for group in range(self.num_groups):
            self._stamp(group, row)
        self.nodes[row, complete:] = NO_NODE
        self.num_blocks[row] = min(int(self.num_blocks[row]), complete)
        self.num_committed[row] = min(int(self.num_committed[row]), complete)
        self.frontier[row] = node
        self.tree.pin(node)
        self.tree.unpin(frontier)
        return complete * self.page_tokens

    def release(self, row: int, token_ids: np.ndarray, num_computed: int, *, keep: bool = True) -> None:
        """End of a request, for good or until it resumes: what it computed becomes cached (with `keep`),
        its last partial block included, and the row is empty.

        token_ids: int32 [>= num_computed].
        """
        if keep and self.enable_prefix_caching and not num_computed < self.replaying.get(row, 0):
            self.commit(row, token_ids, num_computed)
            complete = num_computed // self.page_tokens
            if num_computed % self.page_tokens:
                self._commit_block(row, complete, _key(token_ids[complete * self.page_tokens : num_computed]))
            if num_computed:
                self._add_resume_point(row, int(self.num_committed[row]), since=num_computed)
        self._drop_row(row)

    def _settle_block(self, row: int, block: int) -> None:
        """The block's contents are computed: keep the resume point that belongs at its end, if any."""
        start, end = block * self.page_tokens, (block + 1) * self.page_tokens
        if end == self._prompt_tail_at[row]:
            # Now the prompt's end can be kept to the token; this covers what was kept a block earlier.
            self._add_resume_point(row, block + 1, since=start)
            if block:
                self.tree.drop_resume_point(int(self.nodes[row, block - 1]))
        elif end == self._junction_at[row] or self.retention.keeps_block_end(end, self.page_tokens):
            self._add_resume_point(row, block + 1, since=end)

    def _blocks_of(self, row: int, token_ids: np.ndarray, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that the row has not committed yet and that are complete at `num_tokens`."""
        page_tokens, committed = self.page_tokens, self._num_committed_at[row]
        raw = _key(token_ids[committed * page_tokens : num_tokens // page_tokens * page_tokens])
        return [raw[start : start + 4 * page_tokens] for start in range(0, len(raw), 4 * page_tokens)]

    def _commit_blocks(self, row: int, blocks: list[bytes]) -> None:
        for index, key in enumerate(blocks):
            if self.tree.child(self._frontier_at[row], key) == NO_NODE:
                self._commit_new_blocks(row, blocks[index:])
                return
            self._commit_block(row, self._num_committed_at[row], key)

    def _commit_new_blocks(self, row: int, blocks: list[bytes]) -> list[int]:
        """`_commit_block` for the row's next blocks, the first of which the tree has not: so it has none of them.
        Returns their nodes."""
        tree, parent, first = self.tree, self._frontier_at[row], self._num_committed_at[row]
        nodes = tree.insert_chain(parent, blocks)
        pages = self.tables[:, row, first : first + len(nodes)]
        tree.page[:, nodes] = pages
        tree.refs[:, nodes] = pages != NULL_PAGE  # where slid already, there is nothing to refer to
        tree.pin(nodes[-1])
        tree.unpin(parent)
        self._frontier_at[row] = nodes[-1]
        self.nodes[row, first : first + len(nodes)] = nodes
        self._num_committed_at[row] = first + len(nodes)
        return nodes

    def _commit_block(self, row: int, block: int, key: bytes) -> None:
        """Hand the block to the tree. Where the tree has it already, take the tree's pages for our own;
        where the tree's node is a tombstone, ours revive it. Either way the row holds references."""
        tree = self.tree
        parent = self._frontier_at[row]
        node = tree.child(parent, key)
        if node == NO_NODE:
            node = tree.insert(parent, key)
        tree.pin(node)
        tree.unpin(parent)
        self._frontier_at[row] = node
        self._nodes_at[row][block] = node
        self._num_committed_at[row] = block + 1
        for group in range(self.num_groups):
            self._give_page(group, row, block, node)

    def _give_page(self, group: int, row: int, block: int, node: int) -> None:
        tree, pages = self.tree, self._pages_at[group][row]
        page = pages[block]
        if page == NULL_PAGE:
            return  # slid already
        if tree.page_at[group][node] == NULL_PAGE:
            tree.page_at[group][node] = page
            tree.lock(group, node)
            return
        self.arena.free(group, page)
        self._count_owned(group, -int(tree.refs[group, node] != 0))
        pages[block] = tree.lock(group, node)
        self._stamp(group, row)

    def _add_resume_point(self, row: int, last_block: int, *, since: int) -> None:
        """Make the end of the row's first `last_block` blocks a resume point that holds, of each window, what
        any resume between `since` and there needs, and one block more: a later prompt may part inside the
        last block. Pages that are gone already are left out; where the window at the end itself is
        incomplete, there is no resume point; nor where the policy keeps none."""
        tree = self.tree
        if tree.windowed_groups and not self.retention.keeps_ends:
            return
        node = int(self.nodes[row, last_block - 1])
        end = int(tree.end[node])
        held: list[tuple[int, int]] = []
        for group in tree.windowed_groups:
            spec = tree.specs[group]
            needed = spec.first_needed(end) // self.page_tokens if spec.first_needed(end) < end else last_block
            wanted = spec.first_needed(max(0, since - self.page_tokens)) // self.page_tokens
            path = self.nodes[row, min(wanted, needed) : last_block]
            live = tree.page[group, path] != NULL_PAGE
            if not live[len(path) - (last_block - needed) :].all():
                return
            held += [(group, held_node) for held_node in path[live].tolist()]
        tree.add_resume_point(node, held)

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

    def _drop_row(self, row: int) -> None:
        self._unlock_copy_sources(row)  # a copy that has not run must not, into a page that is no longer ours
        num_blocks = int(self.num_blocks[row])
        # Last block first: an ancestor can go only after its descendants.
        for block in range(num_blocks - 1, -1, -1):
            for group in range(self.num_groups):
                self._release_block(group, row, block)
        frontier = int(self.frontier[row])
        self.frontier[row] = NO_NODE
        self.tree.unpin(frontier)
        self.nodes[row, :num_blocks] = NO_NODE
        self.first_kept[:, row] = self.first_keys[:, row] = self.scratch_end[:, row] = 0
        self.replaying.pop(row, None)
        for group in range(self.num_groups):
            self._stamp(group, row)
        self.num_blocks[row] = self.num_committed[row] = self.num_settled[row] = 0
        self._junction[row] = self._prompt_tail[row] = -1

    def _stamp(self, group: int, row: int) -> None:
        self._stamps_at[group][row] = self._next_stamp
        self._next_stamp += 1

    # Reports

    def _count_owned(self, group: int, change: int) -> None:
        self.num_owned[group] = now = self.num_owned[group] + change
        if now > self.peak_owned[group]:
            self.peak_owned[group] = now

    def usage(self) -> dict[str, GroupUsage]:
        report = {}
        for index, group in enumerate(self.layout.groups):
            lent = int((self.arena.slab_group == index).sum()) * group.pages_per_slab
            used = self.arena.num_used[index]
            owned = self.num_owned[index]
            report[group.name] = GroupUsage(owned=owned, cached=used - owned, free=lent - used)
        return report

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses. True: nothing cached is left."""
        while self.tree.evict_one():
            pass
        return not any(self.usage()[group.name].cached for group in self.layout.groups)
