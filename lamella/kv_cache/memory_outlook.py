"""Questions about memory: what one more request would take, what a preemption would free, how long a chunk may be.

Nothing here changes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.pinned_prefixes import PinnedPrefixes
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings
from lamella.kv_cache.sizing import request_pages
from lamella.kv_cache.spec import ceil_div


class Demand(NamedTuple):
    """What the running requests hold and will need, together with one more request, in bytes.

    total_bytes: what the arena can lend. fits_pools: in fixed pools, whether each group's demand fits into its own
    pool; None where all groups share one pool."""

    num_bytes: int
    total_bytes: int
    fits_pools: bool | None


class Stake(NamedTuple):
    """What the preemption of a row costs, in tokens to compute again, and what it frees, in pages."""

    num_tokens: int  # computed ones that no other request keeps
    num_pages: int  # of all groups together; those that nobody else uses


class ExpectedPrefixes(NamedTuple):
    """What waiting requests expect to find. num_tokens and num_bytes count a place once, however many expect it."""

    num_places: int
    num_requests: int
    num_tokens: int
    num_bytes: int  # of pages that are cached for these places alone


class MemoryOutlook:
    """Answers the questions of BlockManager's methods with the same names; see their docstrings."""

    def __init__(
        self,
        layout: KVLayout,
        settings: CacheSettings,
        rows: RowTables,
        tree: PrefixTree,
        supply: PageSupply,
        chunks: ChunkPages,
        pins: PinnedPrefixes,
    ) -> None:
        self._layout, self._settings, self._pins = layout, settings, pins
        self._rows, self._tree, self._supply, self._chunks = rows, tree, supply, chunks

    def demand(self, num_tokens: int, match: PrefixMatch, growing: Sequence[tuple[int, int]]) -> Demand:
        """See BlockManager.demand.

        In every group the request counts with the most that it can hold if its chunks are small. The passing blocks of
        chunks in flight do not count: chunks are cut to the memory there is, and those pages come back after the step.
        What pinned prefixes keep counts, though nobody uses it: it is not to be had.
        """
        groups, supply = self._layout.groups, self._supply
        pages = [
            owned + pinned - sum(passing) + more
            for owned, pinned, more, *passing in zip(
                supply.num_owned,
                self._pins.num_unowned(match),
                self._wanted_pages(num_tokens, match, growing),
                *self._chunks.num_passing.values(),
                strict=True,
            )
        ]
        num_bytes = sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))
        quota, fits_pools = self._settings.slab_quota, None
        if quota is not None:
            limits = [slabs * group.pages_per_slab for slabs, group in zip(quota, groups, strict=True)]
            fits_pools = all(count <= limit for count, limit in zip(pages, limits, strict=True))
        return Demand(num_bytes, supply.total_bytes, fits_pools)

    def _wanted_pages(self, num_tokens: int, match: PrefixMatch, growing: Sequence[tuple[int, int]]) -> list[int]:
        """Pages per group that the request and the growing rows have yet to take."""
        settings, page_tokens = self._settings, self._layout.page_tokens
        wanted = list(
            request_pages(
                self._layout,
                max_model_len=num_tokens,
                chunk_tokens=page_tokens,
                interval_tokens=settings.interval_tokens,
                num_blocks_more=0,  # what requests leave for their ends goes when memory is wanted
                num_draft_tokens=settings.num_draft_tokens,
            )
        )
        for group in self._tree.full_groups:
            for row, length in growing:
                wanted[group] += ceil_div(length, page_tokens) - int(self._rows.num_blocks[row])
            if match.path:  # what the request shares with running ones is counted there already
                wanted[group] -= int((self._tree.refs[group, match.path] > 0).sum())
        return wanted

    def expected(self, match: PrefixMatch) -> ExpectedPrefixes:
        """See BlockManager.expected."""
        expected = self._tree.expected
        own = match.tail_node if match.tail_node in expected else match.path[-1] if match.path else NO_NODE
        num_bytes = expected.num_bytes - expected.num_bytes_at(own)
        return ExpectedPrefixes(len(expected), expected.num_requests, expected.num_tokens, num_bytes)

    def prefill_room(self, least_share: float) -> int:
        """See BlockManager.prefill_room."""
        step_pages = self._chunks.step_pages
        if not self._tree.windowed_groups:
            return sys.maxsize
        num_tokens = self.sliding_tokens(self._supply.idle_bytes())
        if not step_pages.num_tokens:
            return max(num_tokens, self.sliding_tokens(self._supply.total_bytes * least_share))
        return max(num_tokens, step_pages.num_tokens)

    def sliding_tokens(self, num_bytes: float) -> int:
        """Number of tokens, in whole blocks and at least one, whose sliding KV fits into `num_bytes`."""
        if not self._tree.windowed_groups:
            return sys.maxsize
        block_bytes = sum(self._layout.groups[group].page_bytes for group in self._tree.windowed_groups)
        return max(1, int(num_bytes) // block_bytes) * self._layout.page_tokens

    def stake(self, row: int, num_computed: int) -> Stake:
        """See BlockManager.stake.

        What the row computed stays cached when it leaves. But a row is preempted when nothing else is left to evict, so
        it will soon be evicted, and counts as lost."""
        rows, refs = self._rows, self._tree.refs
        num_blocks = int(rows.num_blocks[row])
        nodes = rows.nodes[row, :num_blocks]
        # A request that shares a block with the row shares all blocks before it too, though not in groups whose window
        # has left them. So any group's reference to the last shared block will do.
        shared = np.flatnonzero((refs[:, nodes[: int(rows.num_committed[row])]] > 1).any(axis=0))
        num_shared_tokens = (int(shared[-1]) + 1) * self._layout.page_tokens if len(shared) else 0
        is_exclusive = (nodes == NO_NODE) | (refs[:, nodes] == 1)
        pages = rows.pages[:, row, :num_blocks]
        is_page = (pages != NULL_PAGE) & (pages < self._chunks.step_pages.first_page)
        return Stake(max(0, num_computed - num_shared_tokens), int((is_exclusive & is_page).sum()))
