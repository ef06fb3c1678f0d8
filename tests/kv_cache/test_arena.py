"""The page allocator against a set-of-units model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.layout import build_layout
from tests.helpers.simulation import full, sliding


def make_arena(num_slabs=5):
    """Full pages of 1 unit, 5 to a slab; SWA pages of 5 units, 1 to a slab."""
    return Arena(build_layout([full()] + [sliding(8)] * 5, page_tokens=4), num_slabs)


def test_all_or_none():
    arena = make_arena(num_slabs=3)
    assert arena.num_allocatable(0) == 10
    assert arena.num_allocatable(1) == 2
    assert arena.allocate(1, 3) is None
    assert arena.num_allocatable(0) == 10
    assert arena.num_used == [0, 0]
    assert len(arena.allocate(1, 2)) == 2


def test_the_null_slab_is_never_lent():
    arena = make_arena(num_slabs=3)
    pages = arena.allocate(0, 10)
    assert min(pages) >= arena.layout.slab_units
    with pytest.raises(ValueError, match="page -1"):
        arena.free(0, NULL_PAGE)
    with pytest.raises(ValueError, match="page 0"):
        arena.free(0, 0)


def test_double_free_and_wrong_group_raise():
    arena = make_arena()
    first, second = arena.allocate(0, 2)
    arena.free(0, first)
    with pytest.raises(ValueError, match="not in use"):
        arena.free(0, first)
    with pytest.raises(ValueError, match="not in use by group 1"):
        arena.free(1, second)
    arena.free(0, second)
    with pytest.raises(ValueError, match="not in use"):
        arena.free(0, second)


def test_placement_order():
    arena = make_arena(num_slabs=6)
    mine = arena.allocate(0, 2)
    other = arena.allocate(0, 5)  # fills a slab of its own, though mine is partly used
    assert {page // 5 for page in other} != {page // 5 for page in mine}
    assert len({page // 5 for page in other}) == 1
    arena.free(0, other[0])  # now 4 used there, 2 used in mine: the fullest partly used slab is next
    assert arena.allocate(0, 1, near_page=mine[0]) == [other[0]]  # a full group too, whichever page it names
    assert arena.allocate(0, 1)[0] // 5 == mine[0] // 5


def test_a_windowed_group_takes_from_the_askers_own_slab_first():
    layout = build_layout([full(heads=3), sliding(8, heads=2)], page_tokens=4)
    assert layout.groups[1].pages_per_slab == 3
    arena = Arena(layout, 6)
    mine = arena.allocate(1, 1)
    other = arena.allocate(1, 3)
    arena.free(1, other[0])
    assert arena.allocate(1, 1) == [other[0]]  # without a page to be near: the fullest
    arena.free(1, other[0])
    assert arena.allocate(1, 1, near_page=mine[0])[0] // layout.slab_units == mine[0] // layout.slab_units


def test_an_emptied_slab_serves_another_group():
    arena = make_arena(num_slabs=2)
    pages = arena.allocate(0, 5)
    assert arena.allocate(1, 1) is None
    for page in pages:
        arena.free(0, page)
    assert arena.allocate(1, 1) == [arena.layout.slab_units]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7), st.randoms(use_true_random=False)), max_size=60))
def test_no_two_pages_ever_overlap(actions):
    """Random takes and frees in three groups; each page's units are disjoint from all others'."""
    layout = build_layout([full(), full(), sliding(8, heads=3), sliding(2, heads=5)], page_tokens=4)
    arena = Arena(layout, 6)
    held: list[tuple[int, int]] = []
    for group, count, random in actions:
        pages = arena.allocate(group, count)
        if pages is not None:
            assert len(pages) == count
            held += [(group, page) for page in pages]
        elif held:
            random.shuffle(held)
            for owner, page in held[: len(held) // 2 + 1]:
                arena.free(owner, page)
            del held[: len(held) // 2 + 1]
        units = [page + unit for owner, page in held for unit in range(layout.groups[owner].page_units)]
        assert len(set(units)) == len(units)
        assert all(layout.slab_units <= unit < 6 * layout.slab_units for unit in units)
        slab_of = {(page // layout.slab_units, owner) for owner, page in held}
        assert len({slab for slab, _ in slab_of}) == len(slab_of), "a slab serves one group at a time"
    for owner, page in held:
        arena.free(owner, page)
    assert arena.num_free_slabs == 5


@pytest.mark.parametrize("count", [5, 7, 10, 23])
def test_whole_slabs_at_once_are_what_one_page_at_a_time_gets(count):
    at_once, one_by_one = make_arena(num_slabs=7), make_arena(num_slabs=7)
    for arena in (at_once, one_by_one):
        assert arena.allocate(1, 1) == [5]
    pages = at_once.allocate(0, count)
    assert pages == [page for _ in range(count) for page in one_by_one.allocate(0, 1)] == list(range(10, 10 + count))
    for arena in (at_once, one_by_one):
        assert arena.num_free_slabs == 6 - 1 - -(-count // 5)
        assert arena.num_lent_slabs == [-(-count // 5), 1]
        assert arena.free_pages_of(0) == set(range(10 + count, 10 + -(-count // 5) * 5))
        for page in pages:
            arena.free(0, page)
        assert arena.num_free_slabs == 5
