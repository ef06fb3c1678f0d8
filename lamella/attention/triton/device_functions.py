"""What several kernels have in common, as functions that are inlined into them.

FP8_MANTISSA: 0, or how many bits of mantissa the cache's bytes have: 3 is e4m3 (no infinity, largest 448), 2 is e5m2.
Kernels that get it see such pages as uint8 and convert by integer arithmetic: that is the same everywhere, whereas what
a GPU's instructions know of these formats, and what the interpreter makes of NaN, differs.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The rule of a KVCacheSpec as the kernels know it.
FULL = tl.constexpr(0)
WINDOW = tl.constexpr(1)
CHUNK = tl.constexpr(2)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_visible(position, reach, RULE: tl.constexpr):
    """First key that a query at `position` sees; reach: the window or chunk, in tokens."""
    if RULE == WINDOW:
        first = tl.maximum(position - reach + 1, 0)
    elif RULE == CHUNK:
        first = position // reach * reach
    else:
        first = position * 0
    return first


@triton.jit
def scaled_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores for exp2, from the products q.k: scale, then soft-cap, then log2(e)."""
    scores = products * scale
    if HAS_SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x): no overflow on either side.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / softcap))))
    return scores * LOG2_E


@triton.jit
def load_pages(table, columns, present):
    """(page in each column of `table`, which columns have one).

    A position in a null page has none: its page is given as 0, which must not be read. Pages are 64-bit integers, as an
    arena may have more than 2^31 elements.
    """
    pages = tl.load(table + columns, mask=present, other=-1).to(tl.int64)
    present = present & (pages >= 0)
    return tl.where(present, pages, 0), present


@triton.jit
def load_rows(pointers, present, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Rows of DIM elements at `pointers`, padded to PADDED_DIM with zeros; rows that are not there are zeros."""
    columns = tl.arange(0, PADDED_DIM)
    mask = present[:, None]
    if DIM != PADDED_DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def widened(stored, dtype: tl.constexpr, FP8_MANTISSA: tl.constexpr):
    """K or V as loaded, in `dtype`. Float16 can hold both kinds of fp8: e5m2 is its upper half, and e4m3 has another
    exponent bias."""
    if FP8_MANTISSA == 0:
        result = stored.to(dtype)
    else:
        bits = stored.to(tl.uint16)
        if FP8_MANTISSA == 2:
            half = (bits << 8).to(tl.float16, bitcast=True)
        else:
            magnitude = bits & 0x7F
            magnitude = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)  # e4m3's only NaN becomes a NaN of float16
            half = (magnitude | ((bits & 0x80) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
            half = half * 256.0  # from 2^-7 instead of 2^-15
        result = half.to(dtype)
    return result


@triton.jit
def stored(x, dtype: tl.constexpr, FP8_MANTISSA: tl.constexpr):
    """x as pages of `dtype` hold it: rounded to nearest even. In fp8, what is too large becomes the largest finite
    number, and NaN stays NaN."""
    if FP8_MANTISSA == 0:
        result = x.to(dtype)
    else:
        dropped: tl.constexpr = 23 - FP8_MANTISSA
        bias: tl.constexpr = (1 << (6 - FP8_MANTISSA)) - 1
        largest: tl.constexpr = 0x7E if FP8_MANTISSA == 3 else 0x7B
        # The last bit of this float32 is one step of the format's subnormals. So adding it to one of these rounds that
        # to whole steps.
        adder: tl.constexpr = 16384.0 if FP8_MANTISSA == 3 else 128.0
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped
        normal = rounded - ((127 - bias) << FP8_MANTISSA)
        steps = (magnitude.to(tl.float32, bitcast=True) + adder).to(tl.int32, bitcast=True) & 0x7FFFFF
        code = tl.minimum(tl.where(magnitude < ((128 - bias) << 23), steps, normal), largest)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        result = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return result
