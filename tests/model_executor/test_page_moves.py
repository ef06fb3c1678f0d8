"""The runner's copies of whole pages on a real arena, against a dictionary of pages."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from lamella.kv_cache.arena import Arena
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.page_transfers import PageCopies, PageMoves
from lamella.model_executor.runner import ModelRunner
from tests.helpers.simulation import full, sliding

# Pages of 1 and 3 units, 3 and 1 to a slab.
LAYOUT = build_layout([full(), sliding(9, heads=3)], page_tokens=4)
NUM_SLABS = 8


def runner_of(layout=LAYOUT, num_slabs: int = NUM_SLABS) -> ModelRunner:
    """A runner that only copies: no model, and an arena of random bytes."""
    runner = ModelRunner.__new__(ModelRunner)
    runner.layout = layout
    generator = torch.Generator().manual_seed(0)
    size = num_slabs * layout.slab_bytes
    runner.arena = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return runner


def contents(runner: ModelRunner, group: int, page: int) -> bytes:
    first = page * runner.layout.unit_bytes
    return runner.arena[first : first + runner.layout.groups[group].page_bytes].numpy().tobytes()


def plan_of(moves, copies=((), ())):
    def pages(pairs, side):
        return np.array([pair[side] for pair in pairs], dtype=np.int64)

    return types.SimpleNamespace(
        moves=tuple(PageMoves(group, pages(pairs, 0), pages(pairs, 1)) for group, pairs in moves),
        groups=[types.SimpleNamespace(copies=PageCopies(pages(pairs, 0), pages(pairs, 1))) for pairs in copies],
    )


def test_moves_run_in_their_order_and_copies_after_them():
    """Page 3 moves to 7, 11 takes its place, and 12 its own; then the page that was in 3 is copied from where it is,
    to where a moved one was."""
    runner = runner_of()
    before = {page: contents(runner, 0, page) for page in range(3, 24)}
    assert len(set(before.values())) == len(before)
    runner._copy_pages(plan_of([(0, [(3, 7)]), (0, [(11, 3), (12, 4)]), (0, [(7, 11)])], [[(11, 12)], []]))
    expected = before | {3: before[11], 4: before[12], 7: before[3], 11: before[3], 12: before[3]}
    assert {page: contents(runner, 0, page) for page in before} == expected


def test_a_slab_that_changed_hands_between_moves():
    """A full page leaves slab 2 (units 6 to 8), then the three units of slab 5 move in as one windowed page."""
    runner = runner_of()
    full_page, windowed_page = contents(runner, 0, 7), contents(runner, 1, 15)
    others = {page: contents(runner, 0, page) for page in (3, 5, 9, 12)}
    runner._copy_pages(plan_of([(0, [(7, 4)]), (1, [(15, 6)])], [[(4, 10)], [(6, 18)]]))
    assert contents(runner, 0, 4) == contents(runner, 0, 10) == full_page
    assert contents(runner, 1, 6) == contents(runner, 1, 18) == windowed_page
    assert {page: contents(runner, 0, page) for page in others} == others


@pytest.mark.parametrize("seed", range(8))
def test_moves_of_a_real_arena_keep_all_contents(seed):
    """Random fills and frees, compaction for both groups by turns until nothing is left to gain, with one plan for
    all moves: every page in use has what it had before."""
    draw = np.random.default_rng(seed)
    layout = build_layout([full(heads=3), sliding(9, heads=2)], page_tokens=4)
    arena, runner = Arena(layout, 12), runner_of(layout, 12)
    where: dict[int, tuple[int, int]] = {}  # page's own name -> (group, where it is)
    for name in range(60):
        group = int(draw.integers(2))
        pages = arena.allocate(group, 1)
        if pages is not None:
            where[name] = (group, pages[0])
    for name in list(where):
        if draw.random() < 0.5:
            arena.free(*where.pop(name))
    before = {name: contents(runner, group, page) for name, (group, page) in where.items()}
    moves = []
    for turn in range(12):
        moved = arena.compact(turn % 2)
        if moved is not None:
            pairs = dict(zip(moved.src_pages.tolist(), moved.dst_pages.tolist(), strict=True))
            for name, (group, page) in where.items():
                if group == moved.group:
                    where[name] = (group, pairs.get(page, page))
            moves.append((moved.group, list(pairs.items())))
        # Slabs that came free are used and left again, so that later moves go where others came from.
        pages = arena.allocate(turn % 2, arena.num_allocatable(turn % 2) // 2) or []
        for page in pages[::2]:
            arena.free(turn % 2, page)
    assert len(moves) > 1
    runner._copy_pages(plan_of(moves))
    assert {name: contents(runner, group, page) for name, (group, page) in where.items()} == before


@pytest.mark.parametrize("page_tokens", [1, 2, 4, 8])
def test_pages_of_any_size_are_copied_whole(page_tokens):
    """3 bytes for each token of a layer: words of 1, 2, 4 and 8 bytes; and an arena that ends inside a word."""
    layout = build_layout([full(1, 1, 2), *[sliding(9)] * 3], page_tokens=page_tokens)
    before = np.random.default_rng(0).integers(0, 256, 91 * layout.unit_bytes + 5, dtype=np.uint8)
    for group, spec in enumerate(layout.groups):
        runner = ModelRunner.__new__(ModelRunner)
        runner.layout, runner.arena = layout, torch.from_numpy(before.copy())
        pairs = ((3, 20), (40, 91 - spec.page_units))
        runner._copy(group, *(np.array(side) for side in zip(*pairs, strict=True)))
        expected = before.copy()
        for source, target in pairs:
            start, size = source * layout.unit_bytes, spec.page_bytes
            expected[target * layout.unit_bytes :][:size] = before[start : start + size]
        assert runner.arena.numpy().tobytes() == expected.tobytes()
