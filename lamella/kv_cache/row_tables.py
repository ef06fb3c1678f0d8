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
    """Plain data, written by other parts of the block manager. Whoever changes an entry of `pages` or `first_kept`
    calls `stamp` for the row, unless the entry is that of a new block.

    first_stamp: the smallest stamp of these tables. Tables that replace others get the `next_stamp` of those, so that
    no stamp is used twice.
    """

    def __init__(self, num_groups: int, num_rows: int, max_blocks: int, *, first_stamp: int = 0) -> None:
        self.num_groups, self.num_rows = num_groups, num_rows
        self.pages = np.full((num_groups, num_rows, max_blocks), NULL_PAGE, dtype=np.int64)
        self.nodes = np.full((num_rows, max_blocks), NO_NODE, dtype=np.int64)
        self.first_kept = np.zeros((num_groups, num_rows), dtype=np.int64)  # in blocks
        # Blocks from here up to first_kept are left for the row's end: pages of them that the tree still has when the
        # row ends are held by the resume point there. In blocks.
        self.first_left = np.zeros((num_groups, num_rows), dtype=np.int64)
        # A row's stamp is a new number whenever entries of its table or its first_kept change. New blocks do not count;
        # num_blocks tells of them. No two rows ever have the same stamp, so whoever keeps a copy of a table knows by
        # the stamp whether the copy is still right.
        self.next_stamp = first_stamp + num_groups * num_rows
        self.stamps = np.arange(first_stamp, self.next_stamp, dtype=np.int64).reshape(num_groups, num_rows)
        self.replay_end: dict[int, int] = {}  # row that replays -> the position where its replay ends
        self.first_keys = np.zeros((num_groups, num_rows), dtype=np.int64)  # lowest key position that exists
        # Windowed pages of blocks below this one are inexact. So they are the row's own even where `nodes` has a node.
        self.scratch_end = np.zeros((num_groups, num_rows), dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.num_committed = np.zeros(num_rows, dtype=np.int64)  # in blocks
        self.num_filled = np.zeros(num_rows, dtype=np.int64)  # committed blocks whose contents are computed
        self.frontier = np.full(num_rows, NO_NODE, dtype=np.int64)  # pinned; NO_NODE: the row is empty
        self.junction = np.full(num_rows, -1, dtype=np.int64)  # block end where another prompt parts from this one
        self.resume_block = np.zeros(num_rows, dtype=np.int64)  # the first block that the row did not find
        # Row -> positions, ascending, where the application says that prompts part, and that are not kept yet.
        self.boundaries: dict[int, tuple[int, ...]] = {}
        self.prompt_tail = np.full(num_rows, -1, dtype=np.int64)  # end of the block that the prompt ends inside of
        # Views of the same memory whose items are plain ints: reading one is several times faster than from an array.
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
        """The row's table of `group` has changed: give it a new stamp."""
        self.stamps_at[group][row] = self.next_stamp
        self.next_stamp += 1

    def in_use(self) -> np.ndarray:
        """Rows that are not empty, int64."""
        return np.flatnonzero(self.frontier != NO_NODE)

    def empty(self, row: int) -> None:
        """Mark the row as empty. Its pages must have been let go already, and its frontier unpinned."""
        self.nodes[row, : self.num_blocks_at[row]] = NO_NODE
        self.frontier[row] = NO_NODE
        self.first_kept[:, row] = self.first_left[:, row] = self.first_keys[:, row] = self.scratch_end[:, row] = 0
        self.replay_end.pop(row, None)
        self.boundaries.pop(row, None)
        for group in range(self.num_groups):
            self.stamp(group, row)
        self.num_blocks[row] = self.num_committed[row] = self.num_filled[row] = 0
        self.junction[row] = self.prompt_tail[row] = -1
