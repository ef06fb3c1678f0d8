"""What several kernels have in common, as functions that are inlined into them."""

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
def load_pages(table, positions, present, PAGE_TOKENS: tl.constexpr):
    """(page of each position, which positions have one). `table` points at the entry of block 0, were there one.

    A null page is none; 0 stands in for it and is not to be read. 64 bits: an arena may have more than 2^31 elements.
    """
    pages = tl.load(table + positions // PAGE_TOKENS, mask=present, other=-1).to(tl.int64)
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
