"""What a model's sizes and factors may be, whatever format states them.

The upper ends are far above any published model and far below what would overflow the arithmetic of a step, or fill
memory with Python objects before the weights have been looked at.
"""

from __future__ import annotations

from typing import NamedTuple


class IntegerRange(NamedTuple):
    low: int
    high: int


class NumberRange(NamedTuple):
    """above: the number must be more than this."""

    above: float
    high: float


LAYERS = IntegerRange(1, 10_000)
SOME_LAYERS = IntegerRange(0, 10_000)  # a part of them
VOCABULARY = IntegerRange(1, 2**26)
WIDTH = IntegerRange(1, 2**24)
HEADS = IntegerRange(1, 2**16)
EXPERTS = IntegerRange(1, 2**16)
HEAD_DIM = IntegerRange(1, 2**16)
POSITIONS = IntegerRange(1, 2**30)  # windows and chunks are counted in positions, too
TOKEN_ID = IntegerRange(0, 2**31 - 1)

NORM_EPSILON = NumberRange(1e-30, 1.0)  # a float32 holds it, so that a row of zeros stays one
ROPE_THETA = NumberRange(1e-6, 1e15)
ROPE_FACTOR = NumberRange(1e-6, 1e9)
QUERY_SCALAR = NumberRange(1e-6, 1e12)
SOFTCAP = NumberRange(1e-6, 1e9)
MULTIPLIER = NumberRange(1e-12, 1e12)
