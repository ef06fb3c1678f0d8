"""Many uniform numbers at once, against one at a time."""

from __future__ import annotations

import numpy as np

from lamella.model_executor.sampling.philox import uniforms
from lamella.model_executor.sampling.sampler import uniform

SEEDS = [0, 1, 42, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1]
DRAWS = [0, 1, 2, 1000, 2**31, 2**40]


def test_each_is_that_of_its_seed_and_draw() -> None:
    pairs = [(seed, draw) for seed in SEEDS for draw in DRAWS]
    pairs += [(int(seed), int(draw)) for seed, draw in np.random.default_rng(0).integers(0, 2**62, size=(200, 2))]
    seeds = np.array([seed for seed, _ in pairs], dtype=np.uint64)
    draws = np.array([draw for _, draw in pairs], dtype=np.int64)
    numbers = uniforms(seeds, draws)
    assert numbers.dtype == np.float64
    assert numbers.tolist() == [uniform(seed, draw) for seed, draw in pairs]
