"""What rows give to the prefix tree: the blocks that they have computed, and places to resume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.spec import ceil_div

_INT32 = np.dtype(np.int32)  # an array's dtype is compared with this several times faster than with np.int32


def block_key(tokens: np.ndarray) -> bytes:
    """The key of a block in the prefix tree: its token ids, as int32, as bytes."""
    return tokens.tobytes() if tokens.dtype == _INT32 else tokens.astype(_INT32).tobytes()


# Fewer new blocks than this are entered one by one, because arrays would cost more than they save.
FEWEST_BLOCKS_AT_ONCE = 6


class RowCommits:
    """Enters the blocks of `rows` in `tree`. Where the tree has a block already, the row's page goes back to `supply`.
    A manager without prefix caching calls nothing here.

    first_step_page: pages with this id or a greater one are step pages. They are nobody's and never enter the tree.
    """

    def __init__(
        self,
        page_tokens: int,
        retention: RetentionPolicy,
        replay: ReplayRule,
        rows: RowTables,
        tree: PrefixTree,
        supply: PageSupply,
        *,
        first_step_page: int,
    ) -> None:
        self._page_tokens, self._retention, self._replay = page_tokens, retention, replay
        self._keeps_block_ends = retention.keeps_block_ends
        self._rows, self._tree, self._supply = rows, tree, supply
        self._first_step_page = first_step_page

    def commit_ahead(self, row: int, token_ids: np.ndarray, num_tokens: int) -> None:
        """Enter the blocks that the step in preparation completes (those below `num_tokens`), as pending, so that a
        request admitted to the same step can share them. Does nothing if the tree has the first of them already: what
        becomes of the row's page for it is decided by `commit`, once its contents are there.

        token_ids: int32 [>= num_tokens].
        """
        tree, blocks = self._tree, self._blocks_of(row, token_ids, num_tokens)
        if blocks and tree.child(self._rows.frontier_at[row], blocks[0]) == NO_NODE:
            self._commit_new_blocks(row, blocks, is_pending=True)

    def commit(self, row: int, token_ids: np.ndarray, num_computed: int, *, ends_prompt: bool = False) -> None:
        """Enter the blocks that are complete at `num_computed` in the tree, and keep resume points.

        token_ids: int32 [>= num_computed]. ends_prompt: this step finished the prompt, so its end becomes a
        resume point.
        """
        rows = self._rows
        if row in rows.replay_end:
            if num_computed < rows.replay_end[row]:
                return
            self._end_replay(row)
        page_tokens = self._page_tokens
        complete = num_computed // page_tokens
        committed = rows.num_committed_at[row]
        if complete - committed == 1:
            self._commit_block(row, committed, block_key(token_ids[committed * page_tokens : complete * page_tokens]))
        elif complete > committed:
            self._commit_blocks(row, self._blocks_of(row, token_ids, num_computed))
        filled: Sequence[int] = range(rows.num_filled_at[row], complete)
        if len(filled) > 2 and not self._keeps_block_ends:  # without a grid only these two ends can be kept
            ends = {rows.prompt_tail_at[row], rows.junction_at[row]}
            filled = sorted(end // page_tokens - 1 for end in ends if end // page_tokens - 1 in filled)
        for block in filled:
            self._keep_block_end(row, block)
        rows.num_filled_at[row] = complete
        if row in rows.boundaries:
            self.keep_boundaries(row)
        if ends_prompt:
            end = complete * page_tokens
            rows.prompt_tail[row] = end + page_tokens if num_computed > end else -1
            if complete:
                self.add_resume_point(row, complete, since=end)
                self._pass_resume_points(row, complete - 1, token_ids)

    def commit_end(self, row: int, token_ids: np.ndarray, num_computed: int) -> None:
        """`commit` for a row that is about to end, its last partial block included, and keep the end as a resume point.
        Enters nothing of a row that has not finished its replay."""
        if num_computed < self._rows.replay_end.get(row, 0):
            return
        self.commit(row, token_ids, num_computed)
        page_tokens = self._page_tokens
        complete = num_computed // page_tokens
        if num_computed % page_tokens:
            self._commit_block(row, complete, block_key(token_ids[complete * page_tokens : num_computed]))
        if num_computed:
            last_block = int(self._rows.num_committed[row])
            self.add_resume_point(row, last_block, since=num_computed)
            if self._rows.boundaries.get(row, (num_computed + 1,))[0] <= num_computed:
                self._tree.favour(self._rows.nodes_at[row][last_block - 1])

    def keep_boundaries(self, row: int) -> None:
        """Keep places to resume at the row's boundaries, as far as the blocks that they lie in are computed, and favour
        them. Each is kept as far as its window is still there. To be called when the row has begun; `commit` does so
        for the blocks that follow."""
        rows, tree = self._rows, self._tree
        num_filled = rows.num_filled_at[row]
        if row in rows.replay_end or (tree.pending and not tree.pending.isdisjoint(rows.nodes_at[row][:num_filled])):
            return  # windows, or whole blocks, are yet to be computed
        boundaries = rows.boundaries[row]
        count = sum(ceil_div(one, self._page_tokens) <= num_filled for one in boundaries)
        for position in boundaries[:count]:
            last_block = ceil_div(position, self._page_tokens)
            self.add_resume_point(row, last_block, since=position)
            tree.favour(rows.nodes_at[row][last_block - 1])
        if count == len(boundaries):
            del rows.boundaries[row]
        elif count:
            rows.boundaries[row] = boundaries[count:]

    def _end_replay(self, row: int) -> None:
        """The replay is done. Give the tree the windowed pages that are exact, where it has none."""
        rows, tree = self._rows, self._tree
        end = rows.replay_end.pop(row) // self._page_tokens
        start = int(rows.first_keys[tree.windowed_groups[0], row])
        for group, exact_from in enumerate(self._replay.exact_from(start)):
            if not tree.specs[group].is_windowed:
                continue
            first = min(end, ceil_div(exact_from, self._page_tokens))
            rows.scratch_end[group, row] = first
            for block in range(max(first, rows.first_kept_at[group][row]), end):
                self._give_page(group, row, block, rows.nodes_at[row][block])
            rows.stamp(group, row)

    def _pass_resume_points(self, row: int, num_blocks: int, token_ids: np.ndarray) -> None:
        """The prompt's end is kept, so resume points in its first `num_blocks` blocks become the first to go, where
        nothing else leads on from them."""
        rows, tree = self._rows, self._tree
        block = rows.resume_block[row]
        tree.pass_by(rows.nodes[row, :num_blocks].tolist())
        if block < num_blocks:  # the row may have resumed from a copy of a short block, which its own block covers
            parent = int(tree.parent[rows.nodes[row, block]])
            tokens = token_ids[block * self._page_tokens : (block + 1) * self._page_tokens]
            tree.pass_by_short_blocks(parent, block_key(tokens))

    def _keep_block_end(self, row: int, block: int) -> None:
        """The block's contents are computed: keep the resume point that belongs at its end, if any."""
        rows = self._rows
        start, end = block * self._page_tokens, (block + 1) * self._page_tokens
        if end == rows.prompt_tail_at[row]:
            # The prompt ended inside this block. Now that the block is complete, the prompt's end can be kept to the
            # token, and the place that was kept a block earlier is not needed any more.
            self.add_resume_point(row, block + 1, since=start)
            if block:
                self._tree.drop_resume_point(int(rows.nodes[row, block - 1]))
        elif end == rows.junction_at[row] or (
            self._keeps_block_ends and self._retention.keeps_block_end(end, self._page_tokens)
        ):
            self.add_resume_point(row, block + 1, since=end)

    def _blocks_of(self, row: int, token_ids: np.ndarray, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that the row has not committed yet and that are complete at `num_tokens`."""
        page_tokens, committed = self._page_tokens, self._rows.num_committed_at[row]
        raw = block_key(token_ids[committed * page_tokens : num_tokens // page_tokens * page_tokens])
        return [raw[start : start + 4 * page_tokens] for start in range(0, len(raw), 4 * page_tokens)]

    def _commit_blocks(self, row: int, blocks: list[bytes]) -> None:
        rows = self._rows
        for index, key in enumerate(blocks):
            if self._tree.child(rows.frontier_at[row], key) == NO_NODE:
                self._commit_new_blocks(row, blocks[index:])
                return
            self._commit_block(row, rows.num_committed_at[row], key)

    def _commit_new_blocks(self, row: int, blocks: list[bytes], *, is_pending: bool = False) -> None:
        """`_commit_block` for the row's next blocks. The tree does not have the first of them, so it has none."""
        rows, tree = self._rows, self._tree
        parent, first = rows.frontier_at[row], rows.num_committed_at[row]
        if len(blocks) < FEWEST_BLOCKS_AT_ONCE:
            for block, key in enumerate(blocks, start=first):
                self._commit_block(row, block, key, is_pending=is_pending)
            return
        nodes = tree.insert_chain(parent, blocks)
        pages = rows.pages[:, row, first : first + len(nodes)]
        is_exact = np.arange(first, first + len(nodes)) >= rows.scratch_end[:, row, None]
        # Where a block has slid, is in a step page or is inexact, its node gets no page.
        pages = np.where(is_exact & (pages < self._first_step_page), pages, NULL_PAGE)
        tree.fill_chain(nodes, pages, is_pending=is_pending)
        last = int(nodes[-1])
        tree.pin(last)
        tree.unpin(parent)
        rows.frontier_at[row] = last
        rows.nodes[row, first : first + len(nodes)] = nodes
        rows.num_committed_at[row] = first + len(nodes)

    def _commit_block(self, row: int, block: int, key: bytes, *, is_pending: bool = False) -> None:
        """Hand the block to the tree. Where the tree has it already, the row uses the tree's pages instead of its own;
        where the tree's node is a tombstone, the row's page revives it. Either way the row holds references.

        is_pending: the block is new, and the step in preparation will compute it."""
        rows, tree = self._rows, self._tree
        parent = rows.frontier_at[row]
        node = tree.child(parent, key)
        if node == NO_NODE:
            node = tree.insert(parent, key, is_pending=is_pending)
        tree.pin(node)
        tree.unpin(parent)
        rows.frontier_at[row] = node
        rows.nodes_at[row][block] = node
        rows.num_committed_at[row] = block + 1
        for group in range(rows.num_groups):
            self._give_page(group, row, block, node)

    def _give_page(self, group: int, row: int, block: int, node: int) -> None:
        """Give the node the row's page for the block. If it has one already, the row uses that and gives its own up."""
        rows, tree = self._rows, self._tree
        pages = rows.pages_at[group][row]
        page = pages[block]
        if page == NULL_PAGE or page >= self._first_step_page or block < rows.scratch_end_at[group][row]:
            return  # the block has slid, or has a step page, or is inexact
        if tree.page_at[group][node] == NULL_PAGE:
            tree.give_page(group, node, page)
            return
        self._supply.give_up(group, page)
        self._supply.count_owned(group, -int(tree.refs_at[group][node] != 0))
        pages[block] = tree.lock(group, node)
        rows.stamp(group, row)

    def add_resume_point(self, row: int, last_block: int, *, since: int) -> None:
        """Make the end of the row's first `last_block` blocks a resume point. In each windowed group it holds what a
        resume anywhere from `since` to that end needs, and one block more, because a later prompt may part inside the
        last block. Pages that are gone already are left out. If the window at the end itself is incomplete, or the
        policy keeps no ends, there is no resume point."""
        tree = self._tree
        if tree.windowed_groups and not self._retention.keeps_ends:
            return
        node = self._rows.nodes_at[row][last_block - 1]
        end = tree.end_of(node)
        held: list[tuple[int, int]] = []
        for group in tree.windowed_groups:
            spec, pages = tree.specs[group], tree.page_at[group]
            first_needed = spec.first_needed(end)
            needed = first_needed // self._page_tokens if first_needed < end else last_block
            wanted = spec.first_needed(max(0, since - self._page_tokens)) // self._page_tokens
            first = min(wanted, needed)
            for block, held_node in enumerate(self._rows.nodes_at[row][first:last_block].tolist(), start=first):
                if pages[held_node] != NULL_PAGE:
                    held.append((group, held_node))
                elif block >= needed:
                    return
        tree.add_resume_point(node, held)
