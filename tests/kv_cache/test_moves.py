"""Compaction under running requests: tables, tree, plan and contents go together."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import arena_of, run_all
from tests.helpers.simulation import full, sliding
from tests.helpers.table_watch import watch_tables

# Several pages to a slab in the groups that can be emptied: 3 and 1; 2 and 3; 6, 2 and 3.
LAYOUTS = {
    "full of 3": [full(), sliding(9, heads=3)],
    "full of 2, sliding of 3": [full(heads=3), sliding(9, heads=2)],
    "full of 6, sliding of 2 and 3": [full(), sliding(5, heads=3), sliding(12, heads=2)],
}
MAX_MODEL_LEN = 60


def pressed(layout: str, num_slabs: int, **options):
    options = {"max_model_len": MAX_MODEL_LEN, "page_tokens": 4, "max_num_seqs": 4} | options
    return arena_of(num_slabs, LAYOUTS[layout], **options)


def watch_moves(simulation) -> Counter[str]:
    """Count from now on the moves in plans, and assert that each plan has all moves that were made for it."""
    manager, schedule, seen = simulation.manager, simulation.scheduler.schedule, Counter()

    def watched():
        plan = schedule()
        if plan is None:
            return None
        made = [
            (move.group, move.src_pages.tolist(), move.dst_pages.tolist()) for move in manager.inspect().supply.moves
        ]
        assert [(move.group, move.src_pages.tolist(), move.dst_pages.tolist()) for move in plan.moves] == made
        if made:
            seen["plans with moves"] += 1
            seen["plans with several moves"] += len(made) > 1
            seen["plans with moves and copies"] += any(len(part.copies.src_pages) for part in plan.groups)
            moved = {(group, page) for group, _, targets in made for page in targets}
            tree = manager.inspect().tree
            shared = {(g, int(tree.page[g, n])) for g, n in zip(*(tree.refs > 1).nonzero(), strict=True)}
            seen["plans that move shared pages"] += bool(moved & shared)
        return plan

    simulation.scheduler.schedule = watched
    return seen


def life(seed: int, num_failing: int = 0) -> Counter[str]:
    """Random requests with shared prefixes in an arena that is short of slabs."""
    draw = random.Random(seed)
    simulation = pressed(
        draw.choice(list(LAYOUTS)),
        draw.choice([22, 26, 30, 36]),
        chunk_tokens=draw.choice([4, 16]),
        interval_tokens=draw.choice([None, 8]),
        retention=RetentionPolicy(spare=draw.random() < 0.5),
    )
    watch_tables(simulation)
    seen = watch_moves(simulation)
    expected = {}
    for index in range(14):
        shared = draw.randint(4, 30)
        prompt = [*range(shared), *[draw.randrange(50) for _ in range(draw.randint(1, 6))]]
        num_tokens = draw.randint(2, 20)
        simulation.add(f"r{index}", prompt, num_tokens)
        expected[f"r{index}"] = foretell(None, prompt, num_tokens)
        for _ in range(draw.randint(1, 6)):
            if num_failing and step_fails_if_it_moves(simulation):
                num_failing -= 1
                seen["failed steps with moves"] += 1
    run_all(simulation)
    assert simulation.outputs == expected
    assert simulation.manager.reset_prefix_cache()
    assert simulation.manager.inspect().arena.num_free_slabs == simulation.manager.inspect().arena.num_slabs - 1
    seen["slabs"] = simulation.manager.inspect().supply.num_slab_moves
    return seen


def step_fails_if_it_moves(simulation) -> bool:
    """One step, which fails if it has moves to make: then nothing is cached, and no request runs or has pages."""
    # Whether a step moves is known only once it is planned: let the executor fail there.
    execute = simulation.executor.execute

    def failing(plan, contexts):
        if plan.moves:
            raise RuntimeError
        return execute(plan, contexts)

    simulation.executor.execute = failing
    try:
        simulation.step()
    except RuntimeError:
        waiting = [request.request_id for request in simulation.scheduler.queue]
        running = [simulation.scheduler.rows.request(row).request_id for row in simulation.scheduler.running]
        simulation.scheduler.roll_back()
        assert not simulation.manager.inspect().supply.moves
        assert not simulation.manager.inspect().supply.copies
        assert [request.request_id for request in simulation.scheduler.queue] == running + waiting
        assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
        return True
    finally:
        simulation.executor.execute = execute
    return False


def test_contents_follow_through_random_lives():
    """The rare cases must have happened: a move in the same step as a copy on write, and a move of shared pages."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        seen += life(seed)
    assert seen["slabs"] > 50
    for kind in ("plans with several moves", "plans with moves and copies", "plans that move shared pages"):
        assert seen[kind] > 0, kind


def test_a_failed_step_with_moves_starts_everything_anew():
    """Nobody knows which pages arrived: what runs starts anew, in order, and outputs are right."""
    seen: Counter[str] = Counter()
    for seed in range(100, 112):
        seen += life(seed, num_failing=3)
    assert seen["failed steps with moves"] > 10


def bare_manager(num_slabs: int, num_rows: int = 8, *, enable_prefix_caching: bool = False) -> BlockManager:
    """Full pages of 1 unit, 3 to a slab; windowed pages of 3 units, a slab each."""
    return BlockManager(
        build_layout([full(), sliding(9, heads=3)], page_tokens=4), num_slabs=num_slabs, num_rows=num_rows,
        max_model_len=32, interval_tokens=4, enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip


def test_a_slab_comes_free_for_another_group():
    """6 rows of one block fill 2 slabs of full pages and 6 windowed ones. All but rows 1 and 5 end, and their slabs
    are taken. Row 1's next block finds a full page, but for its windowed page a slab must be emptied: of the two, the
    one that the new full page is not in."""
    manager = bare_manager(9)
    for row in range(6):
        assert manager.begin(row, manager.match([]))
        assert manager.grow(row, 0, 4, is_prefill=True)
    assert manager.inspect().arena.num_free_slabs == 0
    for row in (0, 2, 3, 4):
        manager.release(row, [], 0, keep=False)
    assert manager.inspect().arena.num_lent_slabs == [2, 2]
    before, stamps = manager.inspect().rows.pages[:, :6, 0].copy(), manager.inspect().rows.stamps.copy()
    assert len({page // 3 for page in before[0, [1, 5]].tolist()}) == 2
    assert manager.inspect().arena.allocate(1, 4) is not None  # another request's
    assert manager.grow(1, 4, 4, is_prefill=False)
    assert manager.inspect().supply.num_slab_moves == 1
    assert manager.inspect().supply.num_moved_pages == 1
    (move,) = manager.inspect().supply.moves
    assert move.group == 0
    where = dict(zip(move.src_pages.tolist(), move.dst_pages.tolist(), strict=True))
    after = manager.inspect().rows.pages[:, :6, 0]
    assert after[0].tolist() == [where.get(page, page) for page in before[0].tolist()]
    assert after[1].tolist() == before[1].tolist()
    pages = [*after[0, [1, 5]].tolist(), int(manager.inspect().rows.pages[0, 1, 1])]
    assert len({page // 3 for page in pages}) == 1, "all in one slab"
    assert len(set(pages)) == 3
    assert (manager.inspect().rows.stamps[0, [1, 5]] != stamps[0, [1, 5]]).all()
    manager.end_step()
    assert manager.inspect().supply.moves == []


def test_the_target_of_a_copy_stays_while_other_pages_move():
    """Row 1 finds 6 tokens, so it is to have a copy of half a block; that copy's full page is alone in its slab. Row 2
    needs a slab for a windowed page. The slab of that one page would be the least to move, but it is to be written
    before the step: the other slab with a free page is emptied, the copy's source in it, and the plan says so."""
    tokens = np.arange(8, dtype=np.int32)
    manager = bare_manager(9, enable_prefix_caching=True)
    assert manager.begin(0, manager.match(tokens))
    assert manager.grow(0, 0, 6, is_prefill=True)
    manager.release(0, tokens, 6)
    (beside_cached,) = manager.inspect().arena.allocate(0, 1)  # another request's, which has a slab full of pages too
    others = manager.inspect().arena.allocate(0, 3)
    match = manager.match(tokens)
    assert match.num_tokens == 6
    assert manager.begin(1, match)
    ((_, source, target), windowed) = manager.inspect().supply.copies[1]
    cached = manager.inspect().tree.page[0, [match.path[0], source]].tolist()
    assert [page // 3 for page in cached] == [beside_cached // 3] * 2
    manager.inspect().arena.free(0, beside_cached)
    manager.inspect().arena.free(0, others[0])
    assert manager.inspect().arena.allocate(1, manager.inspect().arena.num_free_slabs) is not None
    assert manager.inspect().arena.num_lent_slabs[0] == 3, "the cached pages', somebody else's, and the target's alone"
    assert manager.begin(2, manager.match(tokens + 40))
    assert manager.grow(2, 0, 4, is_prefill=True)
    assert manager.inspect().rows.pages[0, 2, 0] == others[0]

    (move,) = manager.inspect().supply.moves
    where = dict(zip(move.src_pages.tolist(), move.dst_pages.tolist(), strict=True))
    assert sorted(where) == sorted(cached)
    assert manager.inspect().rows.pages[0, 1, :2].tolist() == [where[cached[0]], target]
    (full_copy, windowed_copy) = manager.inspect().supply.planned_copies()
    assert [full_copy.src_pages.tolist(), full_copy.dst_pages.tolist()] == [[where[cached[1]]], [target]]
    assert windowed_copy.dst_pages.tolist() == [windowed[2]] == [manager.inspect().rows.pages[1, 1, 1]]
