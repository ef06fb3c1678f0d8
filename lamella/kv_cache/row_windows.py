"""What rows still need of their windows, and when they let go of what they do not need."""

from __future__ import annotations

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings


class RowWindows:
    """Moves each row's first kept block, and the first block that is left for the row's end, in windowed groups.

    A row owns what its next token sees. `num_blocks_more` blocks below that stay in the tree for the row's end, until
    memory is wanted. So wherever the row ends, a resume point can be kept there with that many blocks more.
    """

    def __init__(
        self, page_tokens: int, settings: CacheSettings, rows: RowTables, tree: PrefixTree, supply: PageSupply
    ) -> None:
        self._page_tokens, self._interval_tokens = page_tokens, settings.interval_tokens
        self._num_blocks_more = settings.num_blocks_more
        self._rows, self._tree, self._supply = rows, tree, supply
        self.num_slides = 0  # times that a row let go of blocks of a group

    def slide(self, row: int, position: int, end_position: int, *, at_once: bool) -> None:
        """Let go what no query from `position` on sees. Of that, leave for the row's end what a query at `end_position`
        sees.

        at_once: do so as soon as that is a whole block; otherwise only when it is also an interval of tokens."""
        rows, tree = self._rows, self._tree
        for group in tree.windowed_groups:
            first = tree.specs[group].first_visible(position)
            kept = rows.first_kept_at[group][row]
            lag_tokens = first - kept * self._page_tokens
            if lag_tokens < self._page_tokens or not (at_once or lag_tokens >= self._interval_tokens):
                continue
            new_first = first // self._page_tokens
            self._leave_for_end(group, row, new_first, tree.specs[group].first_visible(end_position))
            for block in range(kept, min(new_first, rows.num_blocks_at[row])):
                self._supply.release_block(group, row, block)
            rows.first_kept_at[group][row] = new_first
            rows.stamp(group, row)
            self.num_slides += 1

    def lowest_owned(self, row: int, num_processed: int, prompt_tokens: int) -> int:
        """The lowest position that the row must own a window for: where it goes on itself or, while its prompt is being
        computed, where a later prompt may resume that parts inside the last whole block of it; or a block before the
        next boundary, where it is not kept yet.

        prompt_tokens: as in BlockManager.slide."""
        if not self._num_blocks_more:
            return num_processed
        lowest = num_processed
        if prompt_tokens:
            last_whole = prompt_tokens // self._page_tokens * self._page_tokens
            lowest = min(lowest, last_whole - self._num_blocks_more * self._page_tokens)
        if row in self._rows.boundaries:
            lowest = min(lowest, self._rows.boundaries[row][0] - self._page_tokens)
        return max(0, lowest)

    def lowest_resume(self, row: int, num_processed: int, num_computed: int) -> int:
        """The lowest position for which a window must be left for the row's end, wherever the row will end. A later
        prompt may part from the row's tokens inside the last block before their end, so this is `num_blocks_more`
        blocks below the end of the last whole block.

        Only what is processed is certain. A row with a decode in flight may end where it was before that; a row with a
        chunk in flight may end at the last whole block before the chunk (see `roll_back`)."""
        if not self._num_blocks_more:
            return num_processed
        page_tokens = self._page_tokens
        has_pending_blocks = self._rows.num_committed_at[row] * page_tokens > num_processed
        last_whole = (num_processed if has_pending_blocks else num_computed) // page_tokens * page_tokens
        return max(0, min(num_processed, last_whole) - self._num_blocks_more * page_tokens)

    def leave_found(self, group: int, row: int, match: PrefixMatch) -> None:
        """The row begins with `match`. Its end may come soon, so leave for it those blocks below the row's window that
        a resume point there would hold beside the window."""
        if not self._num_blocks_more:
            return
        last_whole = match.num_tokens // self._page_tokens * self._page_tokens
        lowest_resume = max(0, last_whole - self._num_blocks_more * self._page_tokens)
        first = self._tree.specs[group].first_needed(lowest_resume) // self._page_tokens
        kept = self._rows.first_kept_at[group][row]
        self._tree.want_for_end(group, match.path[first:kept])
        self._rows.first_left_at[group][row] = min(first, kept)

    def leave_nothing(self, row: int) -> None:
        """Nothing is left for the row's end any more: it has come, or it wants nothing of what has slid."""
        rows, nodes = self._rows, self._rows.nodes_at[row]
        for group in self._tree.windowed_groups:
            kept = rows.first_kept_at[group][row]
            self._tree.want_for_end(group, (), nodes[rows.first_left_at[group][row] : kept])
            rows.first_left_at[group][row] = kept

    def _leave_for_end(self, group: int, row: int, new_first: int, end_first: int) -> None:
        """The row's blocks below `new_first` are about to slide. Leave for its end those that have tokens from
        `end_first` on, and of what was left before only those."""
        rows, nodes = self._rows, self._rows.nodes_at[row]
        kept, left = rows.first_kept_at[group][row], rows.first_left_at[group][row]
        first = min(end_first // self._page_tokens, new_first)
        if nodes[new_first - 1] == NO_NODE:  # the tree does not have the blocks that slide, so none can be left
            first = new_first
        self._tree.want_for_end(group, nodes[max(first, kept) : new_first], nodes[left : min(first, kept)])
        rows.first_left_at[group][row] = max(left, first)
