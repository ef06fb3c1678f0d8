"""What a prompt finds that parts from one that was computed, once all is evicted that may be."""

from __future__ import annotations

import numpy as np

from tests.helpers.simulation import Simulation


def tokens_of(num_tokens: int) -> list[int]:
    return [(7 * index + index // 50) % 50 for index in range(num_tokens)]


def found(simulation: Simulation, tokens: list[int], num_shared: int) -> int:
    """What a prompt finds that shares so many tokens with `tokens` and then parts."""
    other = (tokens[num_shared] + 1) % 50 if num_shared < len(tokens) else 1
    return simulation.manager.match(np.array([*tokens[:num_shared], other, 2, 3], np.int32)).num_tokens


def evict_all(simulation: Simulation) -> None:
    while simulation.manager.inspect().tree.evict_one():
        pass
