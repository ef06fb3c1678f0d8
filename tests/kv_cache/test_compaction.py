"""Emptying a slab by moving its pages: against a model that keeps page contents and searches for slabs itself."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from lamella.kv_cache.arena import Arena
from lamella.kv_cache.layout import KVLayout, build_layout
from lamella.kv_cache.page_transfers import PageMoves
from tests.helpers.simulation import full, sliding

LAYOUTS = {
    "full pages of 1, 5 to a slab; sliding of 5": [full()] + [sliding(8)] * 5,
    "pages of 3 and 2 in slabs of 6": [full(heads=3), sliding(8, heads=2)],
    "three groups, of 2, 3 and 5": [full(heads=2), sliding(8, heads=3), sliding(2, heads=5)],
    "full pages of 3, 26 to a slab; sliding of 26, 3 to a slab": [full(heads=3), sliding(8, heads=26)],
}


class Model:
    """Which pages are in use, by whom, and what is in them; knows nothing of free lists and counters."""

    def __init__(self, layout: KVLayout, num_slabs: int) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        self.contents: dict[tuple[int, int], int] = {}  # (group, page) -> what was written there
        self.num_written = 0

    def write(self, group: int, pages: list[int]) -> None:
        for page in pages:
            assert (group, page) not in self.contents, "a page in use was handed out"
            self.contents[group, page] = self.num_written
            self.num_written += 1
        self.check_disjoint()

    def apply(self, moves: PageMoves) -> None:
        """All sources are read before any target is written, as a batched copy may do; or one after the other:
        the result must be the same, for sources and targets are disjoint."""
        group, sources, targets = moves.group, moves.src_pages.tolist(), moves.dst_pages.tolist()
        assert not set(sources) & set(targets)
        contents = [self.contents.pop((group, source)) for source in sources]
        for target, content in zip(targets, contents, strict=True):
            assert (group, target) not in self.contents, "a page was moved onto one in use"
            self.contents[group, target] = content
        self.check_disjoint()

    def check_disjoint(self) -> None:
        """No two pages share a unit, no slab serves two groups, and all is inside the arena, off the null slab."""
        slab_units = self.layout.slab_units
        units = [page + unit for group, page in self.contents for unit in range(self.page_units(group))]
        assert len(set(units)) == len(units)
        assert all(slab_units <= unit < self.num_slabs * slab_units for unit in units)
        group_of: dict[int, int] = {}
        for group, page in self.contents:
            assert group_of.setdefault(page // slab_units, group) == group

    def page_units(self, group: int) -> int:
        return self.layout.groups[group].page_units

    def pages_per_slab(self, group: int) -> int:
        return self.layout.slab_units // self.page_units(group)

    def used_by_slab(self, group: int) -> dict[int, list[int]]:
        used: dict[int, list[int]] = defaultdict(list)
        for owner, page in self.contents:
            if owner == group:
                used[page // self.layout.slab_units].append(page)
        return used

    def num_free_slabs(self) -> int:
        return self.num_slabs - 1 - len({page // self.layout.slab_units for _, page in self.contents})

    def num_partial_free(self, group: int) -> int:
        """Free pages in the group's slabs."""
        used = self.used_by_slab(group)
        return len(used) * self.pages_per_slab(group) - sum(map(len, used.values()))

    def cheapest_units(self, group: int, immovable: set[int]) -> int | None:
        """Fewest units to move to empty a slab for `group`, by trying every slab of every other group; None: no way."""
        costs = []
        for other in range(len(self.layout.groups)):
            used = self.used_by_slab(other)
            for slab, pages in used.items():
                room = sum(self.pages_per_slab(other) - len(used[another]) for another in used if another != slab)
                is_partial = len(pages) < self.pages_per_slab(other)
                if other != group and is_partial and len(pages) <= room and not immovable.intersection(pages):
                    costs.append(len(pages) * self.page_units(other))
        return min(costs, default=None)


def fragment(arena: Arena, model: Model, rng: random.Random) -> None:
    """Fill the arena with all groups by turns, then free a random share of the pages of each."""
    num_groups = len(model.layout.groups)
    failed: set[int] = set()
    while len(failed) < num_groups:
        group = rng.randrange(num_groups)
        count = rng.randint(1, model.pages_per_slab(group) + 1)
        pages = arena.allocate(group, count)
        if pages is None:
            failed.add(group)
        else:
            model.write(group, pages)
    for group in range(num_groups):
        share = rng.choice([0, 0.1, 0.3, 0.6, 0.9])
        for owner, page in list(model.contents):
            if owner == group and rng.random() < share:
                arena.free(group, page)
                del model.contents[group, page]


@pytest.mark.parametrize("name", LAYOUTS)
def test_compaction_keeps_every_page_and_ends_within_the_bound(name):
    """Random fills and frees; then slabs are gained for one group until there is none left to gain.

    Each gain is the cheapest that a search over all slabs finds, moves less than a slab, and is one free slab
    more; contents follow the moves. At the end no other group has a slab's worth of free pages, and everything
    can be freed.
    """
    layout = build_layout(LAYOUTS[name], page_tokens=4)
    num_gained = 0
    for seed in range(25):
        rng = random.Random(seed)
        arena, model = Arena(layout, 9), Model(layout, 9)
        for _ in range(3):
            fragment(arena, model, rng)
            group = rng.randrange(len(layout.groups))
            written = sorted(model.contents.values())
            while True:
                cheapest = model.cheapest_units(group, set())
                num_free = model.num_free_slabs()
                moves = arena.compact(group)
                if moves is None:
                    break
                num_gained += 1
                assert len(moves.src_pages) * model.page_units(moves.group) == cheapest < layout.slab_units
                model.apply(moves)
                assert model.num_free_slabs() == arena.num_free_slabs == num_free + 1
            assert cheapest is None
            assert sorted(model.contents.values()) == written
            for other in range(len(layout.groups)):
                assert other == group or model.num_partial_free(other) < model.pages_per_slab(other)
                assert arena.num_used[other] == sum(owner == other for owner, _ in model.contents)
                assert len(arena.free_pages_of(other)) == model.num_partial_free(other)
            most = model.num_free_slabs() * model.pages_per_slab(group) + model.num_partial_free(group)
            assert arena.num_allocatable(group) == most
            model.write(group, arena.allocate(group, most))
        for owner, page in model.contents:
            arena.free(owner, page)
        assert arena.num_free_slabs == 8
    assert num_gained > 25, "the adversary must leave something to gain"


@pytest.mark.parametrize("name", LAYOUTS)
def test_immovable_pages_stay(name):
    layout = build_layout(LAYOUTS[name], page_tokens=4)
    num_gained = num_prevented = 0
    for seed in range(100):
        rng = random.Random(seed)
        arena, model = Arena(layout, 9), Model(layout, 9)
        fragment(arena, model, rng)
        share, group = rng.choice([0.05, 0.9]), rng.randrange(len(layout.groups))
        immovable = {page for _, page in model.contents if rng.random() < share}
        cheapest = model.cheapest_units(group, immovable)
        moves = arena.compact(group, immovable=immovable)
        if moves is None:
            assert cheapest is None
            num_prevented += model.cheapest_units(group, set()) is not None
        else:
            num_gained += 1
            assert not immovable.intersection(moves.src_pages.tolist())
            assert len(moves.src_pages) * model.page_units(moves.group) == cheapest
            model.apply(moves)
    assert num_gained
    assert num_prevented


def scattered_arena(slab_quota=None) -> Arena:
    """Full pages of 1 unit, 5 to a slab: two slabs of 2 and 4 pages in use; the third slab holds the sliding page."""
    arena = Arena(build_layout(LAYOUTS["full pages of 1, 5 to a slab; sliding of 5"], page_tokens=4), 4,
                  slab_quota=slab_quota)  # fmt: skip
    pages = arena.allocate(0, 10)
    arena.allocate(1, 1)
    for page in (pages[0], pages[2], pages[3], pages[7]):
        arena.free(0, page)
    return arena


def test_too_few_free_pages_or_too_much_to_move_change_nothing():
    arena = scattered_arena()
    assert arena.compact(1) is None, "4 free pages: a slab of 5 cannot be gained"
    arena.free(0, 11)  # in use in the second slab: 2 + 3 left
    assert sorted(arena.free_pages_of(0)) == [5, 7, 8, 11, 12]
    assert arena.compact(1, max_moved_share=0.39) is None, "2 of 5 pages are to move"
    assert arena.compact(0) is None, "its own free pages it can use as they are"
    assert sorted(arena.free_pages_of(0)) == [5, 7, 8, 11, 12]
    moves = arena.compact(1, max_moved_share=0.4)
    assert moves.src_pages.tolist() == [6, 9]
    assert sorted(moves.dst_pages.tolist()) == [11, 12]
    assert arena.allocate(1, 1) == [5]


def test_fixed_pools_do_not_trade_slabs():
    arena = scattered_arena(slab_quota=(2, 1))
    arena.free(0, 11)
    assert arena.compact(1) is None
    assert sorted(arena.free_pages_of(0)) == [5, 7, 8, 11, 12]
