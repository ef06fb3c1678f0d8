"""Tables of rows: no stamp comes twice, and a row that was emptied is like a new one."""

from __future__ import annotations

import random

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.row_tables import RowTables

ROW_ARRAYS = ("num_blocks", "num_committed", "num_filled", "frontier", "junction", "prompt_tail")
GROUP_ARRAYS = ("first_kept", "first_keys", "scratch_end")


def test_no_stamp_comes_twice_not_even_in_tables_that_take_the_place_of_others():
    draw, seen = random.Random(0), set()
    first_stamp = 0
    for _ in range(3):
        tables = RowTables(2, 5, 4, first_stamp=first_stamp)
        given = tables.stamps.ravel().tolist()
        for _ in range(200):
            group, row = draw.randrange(2), draw.randrange(5)
            others = tables.stamps.copy()
            tables.stamp(group, row)
            given.append(int(tables.stamps[group, row]))
            others[group, row] = tables.stamps[group, row]
            assert others.tolist() == tables.stamps.tolist(), "another row was stamped"
        assert len(set(given)) == len(given)
        assert not seen.intersection(given)
        seen.update(given)
        first_stamp = tables.next_stamp


def test_an_empty_row_is_as_new_and_others_are_as_they_were():
    tables, draw = RowTables(2, 3, 6), random.Random(1)
    for row in range(3):
        num_blocks = draw.randint(2, 6)
        for name in ROW_ARRAYS:
            getattr(tables, name)[row] = num_blocks
        for name in GROUP_ARRAYS:
            getattr(tables, name)[:, row] = 1
        tables.nodes[row, : num_blocks - 1] = 7
        tables.replay_end[row] = 8
    before = {name: getattr(tables, name).copy() for name in (*ROW_ARRAYS, *GROUP_ARRAYS, "nodes", "stamps")}
    tables.empty(1)
    new = RowTables(2, 3, 6)
    for name, array in before.items():
        now, fresh = getattr(tables, name), getattr(new, name)
        assert now[..., 0].tolist() == array[..., 0].tolist() or name == "nodes"
        if name == "nodes":
            assert now[1].tolist() == fresh[1].tolist() == [NO_NODE] * 6
            assert now[[0, 2]].tolist() == array[[0, 2]].tolist()
        elif name == "stamps":
            assert (now[:, 1] != array[:, 1]).all(), "who keeps a copy of the row's table would not know"
        else:
            assert now[..., 1].tolist() == fresh[..., 1].tolist(), name
            assert now[..., 2].tolist() == array[..., 2].tolist()
    assert tables.replay_end == {0: 8, 2: 8}
    assert tables.in_use().tolist() == [0, 2]


def test_items_are_the_same_memory_as_arrays():
    tables = RowTables(2, 3, 6)
    tables.pages_at[1][2][3] = 9
    tables.nodes_at[0][5] = 4
    tables.num_blocks_at[2] = 6
    assert np.argwhere(tables.pages != NULL_PAGE).tolist() == [[1, 2, 3]]
    assert np.argwhere(tables.nodes != NO_NODE).tolist() == [[0, 5]]
    assert tables.num_blocks.tolist() == [0, 0, 6]
