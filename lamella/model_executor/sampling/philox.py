"""The uniform numbers of many draws at once."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_NUM_ROUNDS = 10


def uniforms(seeds: np.ndarray, draw_indices: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1): `sampler.uniform` of each seed (uint64 [n]) and draw (int64 [n]), to the bit.

    Philox4x64-10 (Salmon et al., 2011): the seed is the key's first word, the draw's index + 1 the counter's.
    """
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    counters[0] = draw_indices + 1
    keys = np.zeros((2, len(seeds)), dtype=np.uint64)
    keys[0] = seeds
    for _ in range(_NUM_ROUNDS):
        multiplied, others = counters[::2], counters[1::2]
        high = _high_product(_MULTIPLIERS, multiplied)
        low = _MULTIPLIERS * multiplied
        counters = np.empty_like(counters)
        counters[::2] = high[::-1] ^ others ^ keys
        counters[1::2] = low[::-1]
        keys = keys + _KEY_STEPS
    return (counters[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of the 128-bit products of uint64 arrays, from products of their halves."""
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    product: np.ndarray = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return product
