"""What rows still need of their windows, and when they let go of the rest."""

from __future__ import annotations

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings


class RowWindows:
    """The first kept block of each row and windowed group. A row keeps `num_blocks_more` blocks below what its next
    token sees, so that wherever it ends its end can be kept with as many."""

    def __init__(
        self, page_tokens: int, settings: CacheSettings, rows: RowTables, tree: PrefixTree, supply: PageSupply
    ) -> None:
        self._page_tokens, self._interval_tokens = page_tokens, settings.interval_tokens
        self._num_blocks_more = settings.num_blocks_more
        self._rows, self._tree, self._supply = rows, tree, supply

    def slide(self, row: int, position: int, *, at_once: bool) -> None:
        """Let go what nothing needs that resumes at `position` or later, when an interval of it has gathered, or
        `at_once`."""
        rows = self._rows
        for group in self._tree.windowed_groups:
            first = self._tree.specs[group].first_needed(position)
            kept = rows.first_kept_at[group][row]
            lag_tokens = first - kept * self._page_tokens
            if lag_tokens < self._page_tokens or not (at_once or lag_tokens >= self._interval_tokens):
                continue
            new_first = first // self._page_tokens
            for block in range(kept, min(new_first, rows.num_blocks_at[row])):
                self._supply.release_block(group, row, block)
            rows.first_kept_at[group][row] = new_first
            rows.stamp(group, row)

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

    def first_to_hold(self, group: int, match: PrefixMatch, first: int) -> int:
        """`first`, or the block as far below it as there are pages that the row's end, should it come soon, will need
        to be kept with a block more."""
        if not self._num_blocks_more:
            return first
        last_whole = match.num_tokens // self._page_tokens * self._page_tokens
        lowest_resume = max(0, last_whole - self._num_blocks_more * self._page_tokens)
        lowest = self._tree.specs[group].first_needed(lowest_resume) // self._page_tokens
        pages = self._tree.page_at[group]
        while first > lowest and pages[match.path[first - 1]] != NULL_PAGE:
            first -= 1
        return first
