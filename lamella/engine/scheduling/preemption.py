"""Which running request makes room for another: the one that loses least.

The oldest is never chosen, so it runs in every step until it ends. Age is the order in which requests *first* ran. A
preempted request keeps its age, or newcomers that have more to lose could overtake it for ever.

That is why there is always progress. Of all requests that have run and not ended, take the one that first ran earliest.
While it runs it is the oldest, so it is not preempted and ends. While it waits, preempted, only a limited number of
requests can come before it. Preempted requests are the first in the queue: at once (first come, first served) or after
WaitingQueue's MAX_WAIT_STEPS at most (by prefix). From then on only requests run that have run before, and their number
does not grow. They may preempt each other, but the oldest of those that run always advances. So they end one by one,
and at last there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import BlockManager


def choose_victim(manager: BlockManager, rows: RequestRows, running: Sequence[int]) -> int:
    """Of two or more running rows, the one whose preemption costs the fewest tokens to compute again; of equals the
    youngest.

    A row makes no room if others hold all of its pages, too. It is chosen only if that is true of every row.
    """
    youngest_first = sorted(running, key=lambda row: -rows.request(row).admission_index)[:-1]
    stakes = {row: manager.stake(row, int(rows.num_computed[row])) for row in youngest_first}
    makes_room = [row for row in youngest_first if stakes[row].num_pages]
    return min(makes_room or youngest_first, key=lambda row: stakes[row].num_tokens)
