"""What every battery of scenarios for planted faults has: layers to draw from, how a fault shows, an empty end."""

from __future__ import annotations

from tests.helpers.simulation import chunked, full, sliding

LAYERS = [full(), full(2), sliding(2), sliding(5), sliding(13), sliding(4, 2), chunked(3), chunked(8)]
# What a broken rule may end in. Nothing else: an AttributeError would tell of a fault planted wrongly.
NOTICED = (AssertionError, ValueError)


def drain(simulation):
    assert all(usage.owned == 0 for usage in simulation.manager.usage().values())
    simulation.manager.reset_prefix_cache()
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
    assert simulation.manager.inspect().arena.num_free_slabs == simulation.manager.inspect().arena.num_slabs - 1
    assert simulation.manager.inspect().tree.roots() == {}
