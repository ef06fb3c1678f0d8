"""What rows give to the prefix tree: the blocks that they have computed, and places to resume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.row_pages import RowPages
from lamella.kv_cache.spec import ceil_div


def block_key(tokens: np.ndarray) -> bytes:
    """How the prefix tree knows a block."""
    return tokens.tobytes() if tokens.dtype == np.int32 else tokens.astype(np.int32).tobytes()


# Fewer new blocks are entered one by one: arrays cost more than they save.
FEWEST_BLOCKS_AT_ONCE = 6


class CommittingRows(RowPages):
    """See HybridBlockManager."""

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
            self._commit_new_blocks(row, blocks, is_pending=True)

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
            self._commit_block(row, committed, block_key(token_ids[committed * page_tokens : complete * page_tokens]))
        elif complete > committed:
            self._commit_blocks(row, self._blocks_of(row, token_ids, num_computed))
        unsettled: Sequence[int] = range(self._num_settled_at[row], complete)
        if len(unsettled) > 2 and not self.retention.keeps_block_ends:  # then only these two can matter
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

    def _pass_resume_points(self, row: int, num_blocks: int, token_ids: np.ndarray) -> None:
        """The prompt's end is kept, so places to resume in its first `num_blocks` blocks are worth little."""
        tree, block = self.tree, self._resume_block[row]
        tree.pass_by(self.nodes[row, :num_blocks].tolist())
        if block < num_blocks:  # it resumed from a copy of a short block, which its own block covers
            parent = int(tree.parent[self.nodes[row, block]])
            tokens = token_ids[block * self.page_tokens : (block + 1) * self.page_tokens]
            tree.pass_by_short_blocks(parent, block_key(tokens))

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
        raw = block_key(token_ids[committed * page_tokens : num_tokens // page_tokens * page_tokens])
        return [raw[start : start + 4 * page_tokens] for start in range(0, len(raw), 4 * page_tokens)]

    def _commit_blocks(self, row: int, blocks: list[bytes]) -> None:
        for index, key in enumerate(blocks):
            if self.tree.child(self._frontier_at[row], key) == NO_NODE:
                self._commit_new_blocks(row, blocks[index:])
                return
            self._commit_block(row, self._num_committed_at[row], key)

    def _commit_new_blocks(self, row: int, blocks: list[bytes], *, is_pending: bool = False) -> None:
        """`_commit_block` for the row's next blocks, the first of which the tree has not: so it has none of them."""
        tree, parent, first = self.tree, self._frontier_at[row], self._num_committed_at[row]
        if len(blocks) < FEWEST_BLOCKS_AT_ONCE:
            for block, key in enumerate(blocks, start=first):
                self._commit_block(row, block, key, is_pending=is_pending)
            return
        nodes = tree.insert_chain(parent, blocks)
        pages = self.tables[:, row, first : first + len(nodes)]
        is_exact = np.arange(first, first + len(nodes)) >= self.scratch_end[:, row, None]
        # Where slid already or a step page, there is nothing to give.
        pages = np.where(is_exact & (pages < self._first_step_page), pages, NULL_PAGE)
        tree.fill_chain(nodes, pages, is_pending=is_pending)
        last = int(nodes[-1])
        tree.pin(last)
        tree.unpin(parent)
        self._frontier_at[row] = last
        self.nodes[row, first : first + len(nodes)] = nodes
        self._num_committed_at[row] = first + len(nodes)

    def _commit_block(self, row: int, block: int, key: bytes, *, is_pending: bool = False) -> None:
        """Hand the block to the tree. Where the tree has it already, take the tree's pages for our own;
        where the tree's node is a tombstone, ours revive it. Either way the row holds references.
        is_pending: the block is new, and the step in preparation will compute it."""
        tree = self.tree
        parent = self._frontier_at[row]
        node = tree.child(parent, key)
        if node == NO_NODE:
            node = tree.insert(parent, key, is_pending=is_pending)
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
        if page == NULL_PAGE or page >= self._first_step_page or block < self._scratch_end_at[group][row]:
            return  # slid already, or nobody's, or inexact
        if tree.page_at[group][node] == NULL_PAGE:
            tree.give_page(group, node, page)
            tree.lock(group, node)
            return
        if self.in_flight:  # the step may read the block where it has been
            self.given_up.append((group, page))
        else:
            self.arena.free(group, page)
        self._count_owned(group, -int(tree.refs_at[group][node] != 0))
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
        node = self._nodes_at[row][last_block - 1]
        end = tree.end_of(node)
        held: list[tuple[int, int]] = []
        for group in tree.windowed_groups:
            spec, pages = tree.specs[group], tree.page_at[group]
            first_needed = spec.first_needed(end)
            needed = first_needed // self.page_tokens if first_needed < end else last_block
            wanted = spec.first_needed(max(0, since - self.page_tokens)) // self.page_tokens
            first = min(wanted, needed)
            for block, held_node in enumerate(self._nodes_at[row][first:last_block].tolist(), start=first):
                if pages[held_node] != NULL_PAGE:
                    held.append((group, held_node))
                elif block >= needed:
                    return
        tree.add_resume_point(node, held)
