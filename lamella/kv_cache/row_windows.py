"""What rows still need of their windows, and when they let go of the rest."""

from __future__ import annotations

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings


class RowWindows:
    """The first kept block of each row and windowed group, and the first that is left for the row's end.

    A row owns what its next token sees. `num_blocks_more` blocks below that stay in the tree for its end until memory
    is wanted, so that wherever the row ends its end can be kept with as many.
    """

    def __init__(
        self, page_tokens: int, settings: CacheSettings, rows: RowTables, tree: PrefixTree, supply: PageSupply
    ) -> None:
        self._page_tokens, self._interval_tokens = page_tokens, settings.interval_tokens
        self._num_blocks_more = settings.num_blocks_more
        self._rows, self._tree, self._supply = rows, tree, supply

    def slide(self, row: int, position: int, end_position: int, *, at_once: bool) -> None:
        """Let go what no query from `position` on sees, when an interval of it has gathered, or `at_once`; of that,
        leave for the row's end what a query at end_position sees."""
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

    def lowest_owned(self, num_processed: int, prompt_tokens: int) -> int:
        """The lowest position from which on the row must be able to go on, or a later prompt from the end of its own:
        inside the last block of that, too."""
        if not prompt_tokens or not self._num_blocks_more:
            return num_processed
        last_whole = prompt_tokens // self._page_tokens * self._page_tokens
        return max(0, min(num_processed, last_whole - self._num_blocks_more * self._page_tokens))

    def lowest_resume(self, row: int, num_processed: int, num_computed: int) -> int:
        """The lowest position at which a prompt may resume that parts from the row's tokens inside the last block
        before their end, wherever the row will end: a block below the end of its last whole block. The row that has a
        decode in flight may end where it was before; one with a chunk in flight, at a whole block (see `roll_back`)."""
        if not self._num_blocks_more:
            return num_processed
        page_tokens = self._page_tokens
        has_pending_blocks = self._rows.num_committed_at[row] * page_tokens > num_processed
        last_whole = (num_processed if has_pending_blocks else num_computed) // page_tokens * page_tokens
        return max(0, min(num_processed, last_whole) - self._num_blocks_more * page_tokens)

    def leave_found(self, group: int, row: int, match: PrefixMatch) -> None:
        """The row begins with `match`: of the blocks below its window, leave those for its end that it will need,
        should it come soon, to be kept with a block more."""
        if not self._num_blocks_more:
            return
        last_whole = match.num_tokens // self._page_tokens * self._page_tokens
        lowest_resume = max(0, last_whole - self._num_blocks_more * self._page_tokens)
        first = self._tree.specs[group].first_needed(lowest_resume) // self._page_tokens
        kept = self._rows.first_kept_at[group][row]
        self._tree.want_for_end(group, match.path[first:kept])
        self._rows.first_left_at[group][row] = min(first, kept)

    def leave_nothing(self, row: int) -> None:
        """The row's end is there, or wants nothing of what slid."""
        rows, nodes = self._rows, self._rows.nodes_at[row]
        for group in self._tree.windowed_groups:
            kept = rows.first_kept_at[group][row]
            self._tree.want_for_end(group, (), nodes[rows.first_left_at[group][row] : kept])
            rows.first_left_at[group][row] = kept

    def _leave_for_end(self, group: int, row: int, new_first: int, end_first: int) -> None:
        """The row's blocks below `new_first` are about to slide: leave those that have tokens from `end_first` on for
        its end, and what was left before no more."""
        rows, nodes = self._rows, self._rows.nodes_at[row]
        kept, left = rows.first_kept_at[group][row], rows.first_left_at[group][row]
        first = min(end_first // self._page_tokens, new_first)
        if nodes[new_first - 1] == NO_NODE:  # it slides past what the tree does not have
            first = new_first
        self._tree.want_for_end(group, nodes[max(first, kept) : new_first], nodes[left : min(first, kept)])
        rows.first_left_at[group][row] = max(left, first)
