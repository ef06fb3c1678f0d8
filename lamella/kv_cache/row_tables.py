"""Which pages each row has, as arrays: the block tables of running requests, and how far each row is.

A request in a *row* owns what its row names, and nothing else:

    block          0 ...... first kept ............. commit frontier ........ blocks grown
    full group     [shared with or committed to the tree, locked ][ private            ]
    windowed       [ null, slid ][ committed to the tree, locked ][ private            ]
                                          [ step pages: nobody's, for the time of a step ]

"Locked" blocks carry a node in `nodes`; their pages belong to the tree. Private blocks (node NO_NODE)
own their pages.
"""

from __future__ import annotations

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE


class RowTables:
    """Data: other parts of the block manager write it. Whoever changes an entry of `pages` or `first_kept` calls
    `stamp` for the row, unless the entry is that of a new block.

    first_stamp: no stamp of these tables is less. Those that take the place of others begin at their `next_stamp`.
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int, *, first_stamp: int = 0) -> None:
        self.num_groups, self.num_rows = num_groups, num_rows
        self.pages = np.full((num_groups, num_rows, max_blocks), NULL_PAGE, dtype=np.int64)
        self.nodes = np.full((num_rows, max_blocks), NO_NODE, dtype=np.int64)
        self.first_kept = np.zeros((num_groups, num_rows), dtype=np.int64)  # in blocks
        # Blocks from here up to first_kept are left for the row's end: what the tree still has of them then is kept.
        self.first_left = np.zeros((num_groups, num_rows), dtype=np.int64)
        # A new number when entries of the row's table or its first_kept change, new blocks excepted: those num_blocks
        # tells. No two rows ever have the same, so that who keeps a copy of a table knows whether it is still right.
        self.next_stamp = first_stamp + num_groups * num_rows
        self.stamps = np.arange(first_stamp, self.next_stamp, dtype=np.int64).reshape(num_groups, num_rows)
        self.replay_end: dict[int, int] = {}  # row that replays -> the position from which on it computes as ever
        self.first_keys = np.zeros((num_groups, num_rows), dtype=np.int64)  # lowest key position that exists
        # Windowed pages of blocks below this belong to the row even where `nodes` names a node: they are inexact.
        self.scratch_end = np.zeros((num_groups, num_rows), dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.num_committed = np.zeros(num_rows, dtype=np.int64)  # in blocks
        self.num_filled = np.zeros(num_rows, dtype=np.int64)  # committed blocks whose contents are computed
        self.frontier = np.full(num_rows, NO_NODE, dtype=np.int64)  # pinned; NO_NODE: the row is empty
        self.junction = np.full(num_rows, -1, dtype=np.int64)  # block end where another prompt parts from this one
        self.resume_block = np.zeros(num_rows, dtype=np.int64)  # the first block that the row did not find
        self.prompt_tail = np.full(num_rows, -1, dtype=np.int64)  # end of the block that the prompt ends inside of
        # The same memory one item at a time: plain ints, several times faster than items of an array.
        self.pages_at = [[row.data for row in table] for table in self.pages]  # [group][row][block]
        self.nodes_at = [row.data for row in self.nodes]
        self.first_kept_at = [rows.data for rows in self.first_kept]
        self.first_left_at = [rows.data for rows in self.first_left]
        self.stamps_at = [rows.data for rows in self.stamps]
        self.scratch_end_at = [rows.data for rows in self.scratch_end]
        self.num_blocks_at, self.num_committed_at = self.num_blocks.data, self.num_committed.data
        self.num_filled_at, self.frontier_at = self.num_filled.data, self.frontier.data
        self.junction_at, self.prompt_tail_at = self.junction.data, self.prompt_tail.data

    def stamp(self, group: int, row: int) -> None:
        """The row's table of `group` is not what it was."""
        self.stamps_at[group][row] = self.next_stamp
        self.next_stamp += 1

    def in_use(self) -> np.ndarray:
        """Rows that are not empty, int64."""
        return np.flatnonzero(self.frontier != NO_NODE)

    def empty(self, row: int) -> None:
        """The row is nobody's. Its pages have been let go, and its frontier is pinned no more."""
        self.nodes[row, : self.num_blocks_at[row]] = NO_NODE
        self.frontier[row] = NO_NODE
        self.first_kept[:, row] = self.first_left[:, row] = self.first_keys[:, row] = self.scratch_end[:, row] = 0
        self.replay_end.pop(row, None)
        for group in range(self.num_groups):
            self.stamp(group, row)
        self.num_blocks[row] = self.num_committed[row] = self.num_filled[row] = 0
        self.junction[row] = self.prompt_tail[row] = -1
