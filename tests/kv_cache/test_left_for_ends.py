"""What a running request slides past is left for its end until memory is wanted: it goes after spare pages and before
places to resume, and belongs to nobody meanwhile."""

from __future__ import annotations

import itertools

import pytest

from lamella.kv_cache import invariants
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.kept_ends import evict_all, found, tokens_of
from tests.helpers.simulation import Simulation, full, sliding

PAGE_TOKENS = 4
WINDOWS = [3, 8, 9, 10, 16]


def left_blocks(simulation: Simulation, window: int) -> dict[int, set[int]]:
    """Row -> the sliding blocks that are left for its end: the tree has them, the row does not, and they are needed by
    a prompt that parts from the row inside its last whole block or later."""
    parts, rows, left = simulation.manager.inspect(), simulation.scheduler.rows, {}
    for row in simulation.scheduler.running:
        num_blocks = int(rows.num_computed[row]) // PAGE_TOKENS
        first_key = max(0, (num_blocks - 1) * PAGE_TOKENS - window + 1)
        left[row] = {
            block
            for block in range(first_key // PAGE_TOKENS, num_blocks)
            if parts.rows.pages[1, row, block] == NULL_PAGE
            and parts.tree.page[1, parts.rows.nodes[row, block]] != NULL_PAGE
        }
    return left


def busy(window: int, *, spare: bool) -> Simulation:
    """Four requests are done, so their ends are kept. Three generate: each is two tokens into a block, and so far from
    its prompt that no resume point holds what it slides past."""
    simulation = Simulation(
        [full(), sliding(window), sliding(window)], page_tokens=PAGE_TOKENS, max_model_len=100,
        extra_slabs=200, chunk_tokens=96,
        retention=RetentionPolicy(spare=spare), windowed_replay=False,
    )  # fmt: skip
    for index in range(4):
        simulation.add(f"done {index}", [index, *tokens_of(25)], 3)
    simulation.run()
    for index in range(3):
        simulation.add(f"r{index}", [10 + index, *tokens_of(29)], 60)
    while len(simulation.scheduler.running) < 3 or any(
        int(simulation.scheduler.rows.num_computed[row]) % PAGE_TOKENS != 2
        or int(simulation.scheduler.rows.num_computed[row]) < 56
        for row in simulation.scheduler.running
    ):
        simulation.step()
    return simulation


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_they_go_after_spare_pages_and_before_resume_points(window, spare):
    simulation = busy(window, spare=spare)
    manager, parts, tree = simulation.manager, simulation.manager.inspect(), simulation.manager.inspect().tree
    stages, num_left = [], sum(map(len, left_blocks(simulation, window).values()))
    assert num_left >= 3
    while True:
        num_spare, num_points, left = len(tree.spare), len(tree.resume_points), left_blocks(simulation, window)
        wanted = "spare" if num_spare else "for an end" if any(left.values()) else "resume points"
        tables = parts.rows.pages.copy()
        if not parts.supply.evict_for(1):
            break
        invariants.check(manager)
        stages.append(wanted)
        assert (parts.rows.pages == tables).all()
        lost = sum(map(len, left.values())) - sum(map(len, left_blocks(simulation, window).values()))
        assert lost == (wanted == "for an end")
        assert len(tree.spare) == num_spare - (wanted == "spare")
        assert (len(tree.resume_points) < num_points) == (wanted == "resume points")
    assert [stage for stage, _ in itertools.groupby(stages)] == ["spare"] * spare + ["for an end", "resume points"]
    assert stages.count("for an end") == num_left


@pytest.mark.parametrize("window", WINDOWS)
def test_those_that_slid_first_go_first(window):
    simulation = busy(window, spare=False)
    before = left_blocks(simulation, window)
    tree, rows = simulation.manager.inspect().tree, simulation.scheduler.running
    while simulation.manager.inspect().supply.evict_for(1) and all(left_blocks(simulation, window).values()):
        pass
    first = next(row for row, blocks in left_blocks(simulation, window).items() if not blocks)
    assert first == rows[0], "rows grow in the order in which they run"
    assert all(len(left_blocks(simulation, window)[row]) == len(before[row]) for row in rows[1:])
    assert len(tree.resume_points) >= 4


@pytest.mark.parametrize("window", WINDOWS)
def test_a_generating_request_owns_its_window_alone(window):
    """With an interval of one block, it owns the window as it was when its last block began, and nothing before that.
    What it left for its end counts as idle memory."""
    simulation = busy(window, spare=False)
    manager = simulation.manager
    num_left = sum(map(len, left_blocks(simulation, window).values()))
    parts = manager.inspect()
    idle_bytes, page_bytes = parts.supply.idle_bytes(), manager.layout.groups[1].page_bytes
    for row in simulation.scheduler.running:
        num_blocks = int(parts.rows.num_blocks[row])
        grown_at = (num_blocks - 1) * PAGE_TOKENS  # where its last block begins
        needed = num_blocks - max(0, grown_at - window + 1) // PAGE_TOKENS
        assert (parts.rows.pages[1, row] != NULL_PAGE).sum() == needed
    assert manager.usage()[manager.layout.groups[1].name].owned == parts.supply.num_owned[1]
    while any(left_blocks(simulation, window).values()):
        assert manager.inspect().supply.evict_for(1)
    assert parts.supply.idle_bytes() == idle_bytes >= num_left * page_bytes


@pytest.mark.parametrize("window", WINDOWS)
def test_who_lost_them_goes_on_and_leaves_others_at_the_next_block(window):
    simulation = busy(window, spare=True)
    manager = simulation.manager
    while manager.inspect().tree.spare or any(left_blocks(simulation, window).values()):
        assert manager.inspect().supply.evict_for(1)
    simulation.step()
    tokens, end = end_of(simulation, "r0")
    assert found(simulation, tokens, end) == end, "its window is kept, if no more"
    for _ in range(2 * PAGE_TOKENS):
        simulation.step()
    tokens, end = end_of(simulation, "r1")
    promised = range(end - PAGE_TOKENS, end + 1)
    assert [found(simulation, tokens, shared) for shared in promised] == [*promised]
    simulation.run()
    evict_all(simulation)
    assert all(usage.cached == usage.owned == 0 for usage in manager.usage().values())


@pytest.mark.parametrize("spare", [True, False])
def test_forgetting_the_cache_forgets_them(spare):
    simulation = busy(9, spare=spare)
    assert any(left_blocks(simulation, 9).values())
    assert simulation.manager.reset_prefix_cache()
    assert not any(left_blocks(simulation, 9).values())
    simulation.run()


def end_of(simulation: Simulation, request_id: str) -> tuple[list[int], int]:
    """Abort the running request and evict all spare pages. Returns its tokens, and how many were computed."""
    rows, row = simulation.scheduler.rows, simulation.requests[request_id].row
    end = int(rows.num_computed[row])
    tokens = rows.tokens[row, : end + 1].tolist()
    simulation.finish(request_id)
    while simulation.manager.inspect().tree.spare:
        simulation.manager.inspect().tree.evict_one()
    return tokens, end
