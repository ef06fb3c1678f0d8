"""Which running request makes room for another: the one that loses least.

The oldest is never chosen, so it runs in every step until it ends. Age is the order in which requests *first* ran: one
that was preempted keeps it, or newcomers that have more to lose could overtake it for ever. That is why there is
always progress. Of all that have run and not ended, take the one that first ran first. While it runs it is the oldest,
and so it ends. While it waits, preempted, nothing endless can come before it: preempted requests are the first in the
queue, at once (first come, first served) or after WaitingQueue's MAX_WAIT_STEPS at most (by prefix), and from then on
no request runs that has not run before. Those that have are so many and no more; they preempt each other while the
oldest of them advances, so they come to an end one by one, and at last there is room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.kv_cache.child_index import NO_NODE


def choose_victim(manager: HybridBlockManager, rows: RequestRows, running: Sequence[int]) -> int:
    """The row, of two or more, whose leaving costs the fewest tokens to compute again; of equals the youngest.

    A row all of whose pages others hold too makes no room: it is chosen only if that is so of all.
    """
    youngest_first = sorted(running, key=lambda row: -rows.request(row).admission_index)[:-1]
    makes_room = [row for row in youngest_first if _num_exclusive_pages(manager, row)]
    return min(
        makes_room or youngest_first, key=lambda row: num_tokens_at_stake(manager, row, int(rows.num_computed[row]))
    )


def num_tokens_at_stake(manager: HybridBlockManager, row: int, num_computed: int) -> int:
    """Computed tokens of the row that no other request keeps.

    They stay cached when the row leaves, but it leaves because nothing else is left to evict: so they are what goes.
    """
    nodes = manager.nodes[row, : int(manager.num_committed[row])]
    # Who shares a block shares all before it, in groups whose window has not left them.
    shared = np.flatnonzero((manager.tree.refs[:, nodes] > 1).any(axis=0))
    num_shared_tokens = (int(shared[-1]) + 1) * manager.page_tokens if len(shared) else 0
    return max(0, num_computed - num_shared_tokens)


def has_pending_blocks(manager: HybridBlockManager, row: int, num_computed: int) -> bool:
    """Whether the step in preparation is to compute blocks that the tree has already for the row."""
    return int(manager.num_committed[row]) * manager.page_tokens > num_computed


def _num_exclusive_pages(manager: HybridBlockManager, row: int) -> int:
    num_blocks = int(manager.num_blocks[row])
    nodes = manager.nodes[row, :num_blocks]
    exclusive = (nodes == NO_NODE) | (manager.tree.refs[:, nodes] == 1)
    pages = manager.tables[:, row, :num_blocks]
    return int((exclusive & (pages != NULL_PAGE) & (pages < manager.step_pages.first_page)).sum())
