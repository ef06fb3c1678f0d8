"""Windowed pages that nothing keeps: cached while memory idles, and the first to go."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.kv_cache import invariants
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.serving import arena_of, run_all, serve
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9), sliding(9)]
PROMPT = list(range(48))


def idle(**options) -> Simulation:
    """A prompt of 48 tokens, 12 blocks, was served and nothing runs. Its end holds the window from block 9 on,
    for a resume from 44 on needs the keys from 36 on."""
    options = {"page_tokens": 4, "max_model_len": 96, "retention": RetentionPolicy()} | options
    simulation = Simulation(HYBRID, **options)
    assert serve(simulation, PROMPT) == 0
    return simulation


def found(simulation: Simulation, num_shared: int) -> int:
    """Tokens cached of a prompt that parts from the served one after `num_shared`."""
    return simulation.manager.match(np.array([*PROMPT[:num_shared], 49, 49], dtype=np.int32)).num_tokens


def spare_ends(simulation: Simulation) -> list[int]:
    """Where the blocks of the spare pages end, oldest first."""
    tree = simulation.manager.inspect().tree
    return [int(tree.end[node]) for _, node in tree.spare]


def evict_spare(simulation: Simulation) -> None:
    tree = simulation.manager.inspect().tree
    while tree.spare:
        assert tree.evict_one()
        invariants.check(simulation.manager)


def test_what_slid_out_is_spare_and_found_again():
    simulation = idle()
    assert sorted(spare_ends(simulation)) == [4 * block for block in range(1, 10)]
    assert simulation.manager.usage()["sliding_9"].cached == 12
    assert [found(simulation, shared) for shared in (3, 16, 26, 45)] == [3, 16, 26, 45]
    assert serve(simulation, [*PROMPT[:26], *[49] * 20]) == 26


def test_spare_pages_go_first_and_take_no_resume_point_with_them():
    simulation = idle()
    tree = simulation.manager.inspect().tree
    oldest_first = spare_ends(simulation)
    assert tree.evict_one()
    assert spare_ends(simulation) == oldest_first[1:]
    evict_spare(simulation)
    assert tree.num_evicted_resume_points == 0
    assert simulation.manager.usage()["sliding_9"].cached == 3
    assert [found(simulation, shared) for shared in (26, 44, 48)] == [0, 44, 48]
    assert tree.evict_one()
    assert tree.num_evicted_resume_points == 1
    assert found(simulation, 48) == 0
    assert not tree.spare, "what an evicted resume point held is free, and not spare"
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())


def test_pages_that_a_request_uses_are_not_spare():
    """A request resumes at 24 and needs blocks 4 and 5 (keys 16 to 23). With no spare pages left it still has them."""
    simulation = idle(chunk_tokens=8)
    request = simulation.add("r", [*PROMPT[:24], *[47] * 20], 5)
    simulation.step()
    assert request.num_cached_tokens == 24
    assert sorted(spare_ends(simulation)) == [4, 8, 12, 16, 28, 32, 36]
    evict_spare(simulation)
    run_all(simulation)
    assert found(simulation, 48) == 48
    assert found(simulation, 24) == 24, "where a second prompt parted is kept"
    assert found(simulation, 20) == 0


def test_pages_that_a_resume_point_holds_are_not_spare():
    """The second prompt parts at 24: from then on blocks 4 and 5 are held, even when requests slide past them."""
    simulation = idle()
    serve(simulation, [*PROMPT[:24], *[49] * 20])
    assert not {20, 24} & set(spare_ends(simulation)[:7])
    evict_spare(simulation)
    assert serve(simulation, [*PROMPT[:24], *[48] * 20]) == 24


def test_what_is_expected_is_not_spare():
    """A waiting request counts on a place inside what is spare: its window is kept, the rest goes."""
    simulation = idle(max_num_seqs=1)
    simulation.add("running", [49, 48, 47], 8)
    simulation.step()
    request = simulation.add("waiting", [*PROMPT[:24], 49, 49], 3)
    evict_spare(simulation)
    run_all(simulation)
    assert request.num_cached_tokens == 24


def test_memory_that_is_wanted_comes_from_spare_pages():
    """40 slabs of one windowed page or two full ones. Two idle prompts take 12 windowed and 6 slabs of full pages
    each; a request of 64 tokens finds room without the loss of a place to resume."""
    simulation = arena_of(41, HYBRID, page_tokens=4, max_model_len=96, retention=RetentionPolicy())
    prompts = [[first, *PROMPT[1:]] for first in (40, 41)]
    for prompt in prompts:
        assert serve(simulation, prompt) == 0
    assert simulation.manager.inspect().arena.num_free_slabs == 40 - 2 * (12 + 6)
    assert serve(simulation, [42, *range(40), *range(23)]) == 0
    assert simulation.manager.inspect().tree.num_evicted_resume_points == 0
    assert len(simulation.manager.inspect().tree.spare) < 2 * 9 + 13
    for prompt in prompts:
        assert serve(simulation, [*prompt, 49]) == 48


def test_a_failed_step_leaves_nothing_spare():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=24, retention=RetentionPolicy())
    simulation.add("r", PROMPT, 3)
    simulation.step(fail=True)
    assert not simulation.manager.inspect().tree.spare
    assert simulation.manager.usage()["sliding_9"] == (0, 0, 0)
    simulation.step()
    simulation.step(fail=True)
    tree = simulation.manager.inspect().tree
    assert max(int(tree.end[node]) for node in tree.nodes()) == 24
    run_all(simulation)
    assert found(simulation, 26) == 26


@pytest.mark.parametrize(
    "options",
    [{"retention": RetentionPolicy("none")}, {"retention": RetentionPolicy(spare=False)},
     {"enable_prefix_caching": False}],
)  # fmt: skip
def test_nothing_is_spare_where_nothing_idle_is_kept(options):
    simulation = idle(**options)
    assert not simulation.manager.inspect().tree.spare
    assert found(simulation, 26) == 0
