"""Who moves into a row, and what a row leaves behind."""

from __future__ import annotations

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree, Salt
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.row_windows import RowWindows
from lamella.kv_cache.spec import ceil_div


class RowOccupancy:
    """`begin` and `leave` are a pair: what `begin` takes for a row, `leave` gives back.

    caches_prefixes: whether what rows compute enters the tree.
    """

    def __init__(
        self,
        page_tokens: int,
        replay: ReplayRule,
        rows: RowTables,
        tree: PrefixTree,
        supply: PageSupply,
        chunks: ChunkPages,
        windows: RowWindows,
        *,
        caches_prefixes: bool,
    ) -> None:
        self._page_tokens, self._caches_prefixes = page_tokens, caches_prefixes
        self._replay, self._rows, self._tree = replay, rows, tree
        self._supply, self._chunks, self._windows = supply, chunks, windows

    def begin(self, row: int, match: PrefixMatch, salt: Salt, parting_tokens: int) -> bool:
        """See BlockManager.begin."""
        rows, tree, page_tokens = self._rows, self._tree, self._page_tokens
        assert rows.frontier[row] == NO_NODE, f"row {row} is in use"
        path = match.path
        frontier = path[-1] if path else tree.root(salt)
        if match.skipped_blocks:
            path = [*path, *tree.insert_chain(frontier, list(match.skipped_blocks)).tolist()]
            frontier = path[-1]
        tree.pin(frontier)
        rows.frontier[row] = frontier
        for group in range(rows.num_groups):
            rows.stamp(group, row)
        num_whole = len(path)
        rows.nodes[row, :num_whole] = path
        if match.num_skipped_tokens:
            self._begin_after(row, match.num_tokens)
            return True
        rows.num_blocks[row] = rows.num_committed[row] = rows.num_filled[row] = num_whole
        rows.resume_block[row] = num_whole
        for group, spec in enumerate(tree.specs):
            first = min(spec.first_needed(match.num_tokens) // page_tokens, num_whole)
            if match.num_replayed_tokens and spec.is_windowed:
                first = num_whole
            rows.first_kept[group, row] = rows.first_left[group, row] = first
            if spec.is_windowed:
                self._windows.leave_found(group, row, match)
            rows.pages[group, row, first:num_whole] = self._supply.lock_all(group, path[first:])
        junction = match.num_structural_tokens // page_tokens * page_tokens
        if junction <= match.num_tokens < parting_tokens and tree.windowed_groups:  # the block they part in is kept too
            junction = ceil_div(parting_tokens, page_tokens) * page_tokens
        rows.junction[row] = junction if junction > match.num_tokens else -1
        if match.num_replayed_tokens and not self._begin_replay(row, match):
            self.leave(row)
            return False
        if match.tail_node != NO_NODE and not self._supply.plan_tail_copy(row, match.tail_node, len(match.path)):
            self.leave(row)
            return False
        tree.pass_by(match.path[:-1])
        tree.touch(frontier)
        tree.touch(match.tail_node)
        return True

    def _begin_after(self, row: int, start: int) -> None:
        """Begin at the block boundary `start`, with no KV before it: nothing there is computed or read. The first
        blocks after it are inexact, and stay the row's own."""
        rows, num_blocks = self._rows, start // self._page_tokens
        rows.num_blocks[row] = num_blocks
        if self._caches_prefixes:
            rows.num_committed[row] = rows.num_filled[row] = rows.resume_block[row] = num_blocks
        rows.junction[row] = -1
        rows.first_kept[:, row] = rows.first_left[:, row] = num_blocks
        rows.first_keys[:, row] = start
        rows.scratch_end[:, row] = [ceil_div(exact, self._page_tokens) for exact in self._replay.exact_from(start)]

    def _begin_replay(self, row: int, match: PrefixMatch) -> bool:
        """Own scratch pages for the windowed KV of the tokens that are replayed. Their full-attention KV is locked
        already. False: there is no memory; the caller lets the row `leave`."""
        rows, groups = self._rows, self._tree.windowed_groups
        start, end = match.num_tokens // self._page_tokens, len(match.path)
        self._windows.leave_nothing(row)
        if not self._supply.own_pages(row, [(group, start, end) for group in groups]):
            return False
        rows.first_kept[groups, row] = rows.first_left[groups, row] = start
        rows.first_keys[groups, row] = match.num_tokens
        rows.scratch_end[groups, row] = end
        rows.num_filled[row] = end - 1  # so that `commit` is called when the replay is done
        rows.replay_end[row] = end * self._page_tokens
        return True

    def roll_back(self, row: int, num_computed: int) -> int:
        """See BlockManager.roll_back."""
        rows, tree = self._rows, self._tree
        if row in rows.replay_end:
            return 0
        self._supply.drop_copies(row)
        self._chunks.drop(row)
        complete = num_computed // self._page_tokens
        for block in range(int(rows.num_blocks[row]) - 1, complete - 1, -1):
            for group in range(rows.num_groups):
                self._supply.release_block(group, row, block)
        frontier = node = int(rows.frontier[row])
        for _ in range(int(rows.num_committed[row]) - complete):
            node = int(tree.parent[node])
        for group in range(rows.num_groups):
            rows.stamp(group, row)
        rows.nodes[row, complete:] = NO_NODE
        rows.num_blocks[row] = min(int(rows.num_blocks[row]), complete)
        rows.num_committed[row] = min(int(rows.num_committed[row]), complete)
        rows.frontier[row] = node
        tree.pin(node)
        tree.unpin(frontier)
        return complete * self._page_tokens

    def leave(self, row: int) -> None:
        """Empty the row: its private pages become free, and it uses nothing of the tree any more."""
        rows = self._rows
        self._supply.drop_copies(row)  # the pages they were to write will be others'
        self._chunks.drop(row)
        self._windows.leave_nothing(row)
        # Last block first: an ancestor can go only after its descendants.
        for block in range(int(rows.num_blocks[row]) - 1, -1, -1):
            for group in range(rows.num_groups):
                self._supply.release_block(group, row, block)
        self._tree.unpin(int(rows.frontier[row]))
        rows.empty(row)
