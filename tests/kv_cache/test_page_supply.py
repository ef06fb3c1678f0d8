"""Pages for rows: a row gets all it asks for or none, the counts equal those found in the tables, and a page is free
when the last row has let it go."""

from __future__ import annotations

import random

import pytest

from lamella.kv_cache.arena import NULL_PAGE
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.simulation import full, sliding

HYBRID = [full(), sliding(9)]


def owned(parts) -> list[int]:
    """Pages that rows name, each once, per group."""
    return [len(set(table[table != NULL_PAGE].tolist())) for table in parts.rows.pages]


def test_rows_that_grow_and_let_go_at_random_own_what_their_tables_name():
    draw, parts = random.Random(3), make_parts([full(), sliding(9), sliding(9)], num_slabs=12)
    num_refused = most = 0
    for row in range(4):
        occupy(parts, row, 0)
    for _ in range(400):
        row = draw.randrange(4)
        num_blocks, before = int(parts.rows.num_blocks[row]), parts.rows.pages.copy()
        if draw.random() < 0.6:
            wanted = min(20, num_blocks + draw.randint(0, 4))
            if parts.supply.extend(row, wanted):
                assert (parts.rows.pages[:, row, :wanted] != NULL_PAGE).sum() >= (before[:, row] != NULL_PAGE).sum()
                assert parts.rows.num_blocks[row] == wanted
            else:
                num_refused += 1
                assert ((parts.rows.pages == NULL_PAGE) == (before == NULL_PAGE)).all(), "all or none"
                assert parts.rows.num_blocks[row] == num_blocks
        elif num_blocks:
            for group in range(2):
                parts.supply.release_block(group, row, num_blocks - 1)
            parts.rows.num_blocks[row] -= 1
        assert parts.supply.num_owned == parts.arena.num_used == owned(parts)
        most = max(most, owned(parts)[1])
    assert num_refused > 10
    assert parts.supply.peak_owned[1] >= most
    for row in range(4):
        for block in range(int(parts.rows.num_blocks[row])):
            for group in range(2):
                parts.supply.release_block(group, row, block)
    assert parts.supply.num_owned == parts.arena.num_used == [0, 0]
    assert parts.arena.num_free_slabs == 11


def test_a_page_of_the_tree_is_owned_once_however_many_use_it():
    parts = make_parts(HYBRID)
    occupy(parts, 0, 4)
    parts.commits.commit(0, tokens_of(4), 4)
    node = int(parts.rows.frontier[0])
    for group in range(2):
        page = int(parts.tree.page[group, node])
        assert parts.supply.lock(group, node) == page
        assert parts.supply.num_owned[group] == 1
        parts.supply.unlock(group, node)
        assert parts.supply.num_owned[group] == 1
        parts.supply.release_block(group, 0, 0)
        assert parts.supply.num_owned[group] == 0
    assert parts.tree.page[0, node] != NULL_PAGE, "it is cached"


@pytest.mark.parametrize("in_flight", [False, True])
def test_what_is_given_up_while_a_step_is_in_flight_is_free_when_that_is_processed(in_flight):
    parts = make_parts(HYBRID)
    (page,) = parts.arena.allocate(0, 1)
    parts.supply.in_flight = in_flight
    parts.supply.give_up(0, page)
    assert parts.arena.num_used[0] == int(in_flight)
    parts.supply.free_given_up()
    assert parts.arena.num_used[0] == 0
    assert parts.supply.given_up == []


def test_nothing_moves_while_a_step_is_in_flight():
    """Two pages in each of two slabs of three: together they fill less than two."""
    parts = make_parts([full(), sliding(9), sliding(9), sliding(9)], num_slabs=5, num_rows=1)
    pages = parts.arena.allocate(0, 6)
    for page in (pages[0], pages[1], pages[3], pages[4]):
        parts.arena.free(0, page)
    assert parts.arena.num_lent_slabs[0] == 2
    parts.supply.in_flight = True
    assert not parts.supply.compact(1)
    parts.supply.in_flight = False
    assert parts.supply.compact(1)
    (moves,) = parts.supply.moves
    assert (moves.group, len(moves.src_pages), parts.arena.num_lent_slabs[0]) == (0, 1, 1)
    assert not parts.supply.compact(1), "one slab is as few as there can be"


def test_a_copys_source_stays_until_it_has_run_and_without_memory_nothing_changes():
    parts = make_parts(HYBRID, num_slabs=6)
    occupy(parts, 0, 4)
    parts.commits.commit(0, tokens_of(4), 4)
    source = int(parts.rows.frontier[0])
    refs = parts.tree.refs[:, source].tolist()
    occupy(parts, 1, 0)
    assert parts.supply.plan_tail_copy(1, source, 0)
    assert parts.tree.refs[:, source].tolist() == [count + 1 for count in refs]
    planned = [(part.src_pages.tolist(), part.dst_pages.tolist()) for part in parts.supply.planned_copies()]
    sources, targets = parts.tree.page[:, source].tolist(), parts.rows.pages[:, 1, 0].tolist()
    assert planned == [([one], [other]) for one, other in zip(sources, targets, strict=True)]
    parts.supply.in_flight = True
    assert [len(part.src_pages) for part in parts.supply.planned_copies()] == [0, 0], "they are the step's in flight"
    parts.supply.in_flight = False
    parts.supply.drop_copies(1)
    assert parts.tree.refs[:, source].tolist() == refs
    taken = [parts.arena.allocate(group, parts.arena.num_allocatable(group)) for group in (0, 1)]
    assert all(pages is not None for pages in taken)
    occupy(parts, 2, 0)
    before = (parts.arena.num_used[:], parts.supply.num_owned[:], parts.rows.pages.tolist())
    assert not parts.supply.plan_tail_copy(2, source, 0)
    assert (parts.arena.num_used, parts.supply.num_owned, parts.rows.pages.tolist()) == before
    assert parts.tree.refs[:, source].tolist() == refs
    assert not parts.supply.copies
