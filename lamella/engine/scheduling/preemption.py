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

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import BlockManager


def choose_victim(manager: BlockManager, rows: RequestRows, running: Sequence[int]) -> int:
    """The row, of two or more, whose leaving costs the fewest tokens to compute again; of equals the youngest.

    A row all of whose pages others hold too makes no room: it is chosen only if that is so of all.
    """
    youngest_first = sorted(running, key=lambda row: -rows.request(row).admission_index)[:-1]
    stakes = {row: manager.stake(row, int(rows.num_computed[row])) for row in youngest_first}
    makes_room = [row for row in youngest_first if stakes[row].num_pages]
    return min(makes_room or youngest_first, key=lambda row: stakes[row].num_tokens)
