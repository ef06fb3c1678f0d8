"""What each retention policy keeps, told by what a later prompt finds."""

from __future__ import annotations

import pytest

from lamella.errors import ConfigError
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9), sliding(9)]
PROMPT = list(range(48))


def hit_after(retention, specs=HYBRID, *, shared=26):
    """How many tokens are found of a prompt that parts from an earlier, finished one after `shared` tokens."""
    simulation = Simulation(specs, page_tokens=4, max_model_len=96, retention=retention)
    simulation.add("first", PROMPT, 8)
    simulation.run()
    second = simulation.add("second", [*PROMPT[:shared], *[49] * 20], 1)
    simulation.run()
    return second.num_cached_tokens


def test_tails_keep_ends_and_no_middle():
    assert hit_after(RetentionPolicy(spare=False)) == 0
    assert hit_after(RetentionPolicy(spare=False), shared=47) == 47


def test_all_keeps_every_place():
    assert hit_after(RetentionPolicy("all")) == 26
    assert hit_after(RetentionPolicy("all"), shared=47) == 47


def test_a_grid_keeps_one_place_in_so_many_tokens():
    """Every 18 tokens are every 20, rounded up to blocks of 4: the last one before 26 is 20."""
    assert hit_after(RetentionPolicy("tails", 18, spare=False)) == 20
    assert hit_after(RetentionPolicy("tails", 18, spare=False), shared=47) == 47


def test_none_keeps_nothing_once_nobody_runs():
    assert hit_after(RetentionPolicy("none"), shared=47) == 0
    assert hit_after(RetentionPolicy("none"), [full()], shared=47) == 47, "without sliding layers nothing is lost"
    simulation = Simulation(HYBRID, page_tokens=4, retention=RetentionPolicy("none"))
    simulation.add("first", PROMPT, 8)
    simulation.run()
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())


@pytest.mark.parametrize("arguments", [("some",), ("tails", 0), ("all", 64)])
def test_bad_policies_are_refused(arguments):
    with pytest.raises(ConfigError, match="retention"):
        RetentionPolicy(*arguments)
