"""Places where the application says that prompts part: kept whatever the chunks, and kept before others."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lamella.kv_cache.resume_points import FAVOUR_TURNS, ResumePoints
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.simulation import Simulation, chunked, full, sliding

PROMPT = [(7 * index + index // 50) % 50 for index in range(61)]
LAYERS = {
    "hybrid": [full(), sliding(9), sliding(9)],
    "two windows": [full(2), sliding(5), sliding(12)],
    "chunked": [full(), chunked(8)],
    "windows only": [sliding(9), sliding(5)],
    "full only": [full()],
}


def evict_ordinary(simulation: Simulation) -> None:
    """Evict everything but what is favoured."""
    tree = simulation.manager.inspect().tree
    points = tree.resume_points
    while tree.evict_for_end():
        pass
    while tree.spare or any(tree._keeps_memory(one) and not points.is_favoured(one) for one in points):
        tree.evict_one()


def num_found(simulation: Simulation, num_shared: int, prompt=PROMPT) -> int:
    """What a prompt finds that parts after so many tokens."""
    other = 49 - prompt[num_shared] if num_shared < len(prompt) else 0
    return simulation.manager.match(np.array([*prompt[:num_shared], other, 1], np.int32)).num_tokens


SOME = [("hybrid", 4, 17, 0), ("hybrid", 4, 61, 61), ("two windows", 16, 17, 61), ("chunked", 4, 3, 0)]
EVERY = product(LAYERS, (1, 4, 16), (3, 17, 61), (0, 61))


@pytest.mark.parametrize(
    ("layers", "page_tokens", "chunk_tokens", "step_tokens"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in SOME)],
)
def test_a_boundary_is_found_to_the_token_whatever_the_chunks(layers, page_tokens, chunk_tokens, step_tokens):
    for boundary in (1, 15, 16, 17, 31, 50, 60, 61):
        simulation = Simulation(
            LAYERS[layers], page_tokens=page_tokens, chunk_tokens=chunk_tokens, max_model_len=100,
            step_tokens=step_tokens, never_idle=bool(step_tokens), windowed_replay=False,
        )  # fmt: skip
        simulation.add("a", PROMPT, 5, boundaries=[boundary])
        simulation.run()
        assert simulation.outputs["a"] == foretell(None, PROMPT, 5)
        evict_ordinary(simulation)
        assert num_found(simulation, boundary) == boundary
        simulation.add("b", [*PROMPT[:boundary], 0, 1, 2], 3)
        simulation.run()
        assert simulation.requests["b"].num_cached_tokens == boundary
        assert simulation.outputs["b"] == foretell(None, [*PROMPT[:boundary], 0, 1, 2], 3)
        assert simulation.manager.reset_prefix_cache(), "nothing is left"


def test_without_the_hint_nothing_is_kept_there():
    """The other tests would pass if all was kept."""
    simulation = Simulation(LAYERS["hybrid"], chunk_tokens=61, max_model_len=100, windowed_replay=False)
    simulation.add("a", PROMPT, 5)
    simulation.run()
    assert num_found(simulation, 31) == 0


def test_several_boundaries_of_one_prompt_with_a_step_in_flight():
    for layers, chunk_tokens in product(LAYERS.values(), (3, 17)):
        simulation = LateSimulation(layers, chunk_tokens=chunk_tokens, max_model_len=100, windowed_replay=False)
        simulation.add("a", PROMPT, 5, boundaries=[10, 11, 30, 59])
        simulation.run()
        evict_ordinary(simulation)
        assert [num_found(simulation, boundary) for boundary in (10, 11, 30, 59)] == [10, 11, 30, 59]


def test_a_boundary_in_what_is_cached_is_kept_from_then_on():
    simulation = Simulation(LAYERS["hybrid"], max_model_len=100, retention=RetentionPolicy())  # spare pages stay
    simulation.add("a", PROMPT, 5)
    simulation.run()
    assert num_found(simulation, 30) == 30, "while memory idles"
    simulation.add("b", PROMPT, 5, boundaries=[30])
    simulation.run()
    evict_ordinary(simulation)
    assert num_found(simulation, 30) == 30


@pytest.mark.parametrize("layers", LAYERS)
def test_a_boundary_behind_a_replay_or_a_skipped_beginning(layers):
    """Where windows are computed again, or the first tokens not at all, boundaries ahead are kept all the same."""
    base = [index % 47 for index in range(150)]
    for boundary, skips in product((100, 120, 149), (False, True)):
        simulation = Simulation(LAYERS[layers], page_tokens=4, chunk_tokens=40, max_model_len=200, skips_prompts=skips)
        simulation.add("a", base[:110], 3)
        simulation.run()
        simulation.add("b", base, 3, boundaries=[boundary])
        simulation.run()
        assert simulation.outputs["b"] == foretell(None, base, 3)
        evict_ordinary(simulation)
        simulation.manager.inspect().supply._replay.most_tokens = 0
        simulation.manager.inspect().supply._replay.can_skip = False
        if boundary > 110 or layers == "full only":
            assert num_found(simulation, boundary, base) == boundary


def test_an_aborted_prompt_keeps_the_boundaries_that_it_reached():
    simulation = Simulation(LAYERS["hybrid"], chunk_tokens=8, max_model_len=100, windowed_replay=False)
    simulation.add("a", PROMPT, 5, boundaries=[13, 40])
    for _ in range(3):
        simulation.step()
    simulation.finish("a")
    evict_ordinary(simulation)
    assert (num_found(simulation, 13), num_found(simulation, 40)) == (13, 16)
    assert simulation.manager.inspect().rows.boundaries == {}
    assert simulation.manager.reset_prefix_cache()


def test_without_a_cache_or_without_retention_a_boundary_means_nothing():
    for options in ({"enable_prefix_caching": False}, {"retention": RetentionPolicy("none")}):
        simulation = Simulation(LAYERS["hybrid"], max_model_len=100, **options)
        simulation.add("a", PROMPT, 5, boundaries=[13, 40])
        simulation.run()
        assert simulation.outputs["a"] == foretell(None, PROMPT, 5)
        assert num_found(simulation, 13) == 0
        assert simulation.manager.inspect().rows.boundaries == {}


def test_a_favour_ends_when_nobody_comes_back():
    """Else hints that were wrong would drive everything else out of the cache for ever."""
    points = ResumePoints()
    for node in range(100):
        points.put(node, [])
    points.favour(0)
    points.favour(1)
    for use in range(FAVOUR_TURNS * 100 - 1):  # the favour of node 1 counts as the first use after that of node 0
        assert points.first() != 0
        points.touch(2 + use % 98)
    assert points.is_favoured(0)
    points.touch(1)
    assert not points.is_favoured(points.first())
    points.touch(2)
    assert points.first() == 0, "of all that are not favoured it was used the longest ago"
    assert points.is_favoured(1)
