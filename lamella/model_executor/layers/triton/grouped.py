"""Products of rows with the weights of the experts that they go to, as one launch; and the sum of what these give.

Rows are sorted by expert (`sorted_rows`). Which program computes what follows from arrays on the device, and how many
there are from shapes alone, so that steps can be captured as CUDA graphs. A row's sum runs over the inputs in blocks of
a fixed size, one after the other: it does not depend on who else takes the expert, but on the size of the tile, which
depends on the number of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lamella.errors import InvariantError
from lamella.model_executor.layers.triton.rows import check_rows, launch_options

COMBINE_ELEMENTS = 1024


class SortedRows(NamedTuple):
    """What goes to which expert. A pair is a token and one of its experts: pair p is of token p // top_k.

    order: int64 [T * top_k], pairs by expert, ascending in each. begins: int32 [num_experts + 1], where each expert's
    pairs begin in it.
    """

    order: torch.Tensor
    begins: torch.Tensor


def sorted_rows(expert_ids: torch.Tensor, num_experts: int) -> SortedRows:
    """expert_ids: int64 [T, top_k]. Waits for nothing."""
    ids = expert_ids.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids + 1, torch.ones_like(ids, dtype=torch.int32))
    return SortedRows(ids.argsort(stable=True), counts.cumsum(0, dtype=torch.int32))


@triton.jit
def grouped_kernel(
    x,
    order,
    begins,
    weight,
    bias,
    factors,
    out,
    x_row_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Program (tile of rows, block of outputs): out[p] = x[p // PAIRS_PER_ROW] * factors[p] times the weight of pair
    p's expert, [NUM_EXPERTS * NUM_OUT, NUM_IN], plus its bias, [NUM_EXPERTS * NUM_OUT]. bias and factors may each be
    None; x's rows may lie apart, out is contiguous. No tile has rows of two experts."""
    expert_numbers = tl.arange(0, EXPERTS_BLOCK)
    present = expert_numbers < NUM_EXPERTS
    first = tl.load(begins + expert_numbers, mask=present, other=0)
    stop = tl.load(begins + expert_numbers + 1, mask=present, other=0)
    num_tiles = (stop - first + BLOCK_M - 1) // BLOCK_M
    tile_stops = tl.cumsum(num_tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((present & (tile_stops <= tile)).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return
    tile_in_expert = tile - tl.sum(tl.where(expert_numbers < expert, num_tiles, 0), 0)
    place = tl.load(begins + expert) + tile_in_expert * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(begins + expert + 1)
    pair = tl.load(order + place, mask=is_row, other=0)
    rows = x + (pair // PAIRS_PER_ROW) * x_row_stride
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < NUM_OUT
    output = expert.to(tl.int64) * NUM_OUT + column
    if factors is not None:
        factor = tl.load(factors + pair, mask=is_row, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < NUM_IN
        values = tl.load(rows[:, None] + k, mask=is_row[:, None] & is_input, other=0.0)
        if factors is not None:
            values = (values.to(tl.float32) * factor[:, None]).to(x.dtype.element_ty)
        weights = tl.load(weight + output[:, None] * NUM_IN + k, mask=is_column[:, None] & is_input, other=0.0)
        if IN_FLOAT32:
            values, weights = values.to(tl.float32), weights.to(tl.float32)
        sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, mask=is_column, other=0.0).to(tl.float32)
    place_out = out + pair[:, None] * NUM_OUT + column
    tl.store(place_out, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit
def combine_kernel(given, weights, shared, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of it): shared, unless it is None, plus the sum of given[token * TOP_K + i] times
    weights[token * TOP_K + i], i ascending; weights None: all are 1. All contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if shared is not None:
        total += tl.load(shared + token * WIDTH + column, mask=present, other=0.0).to(tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        value = tl.load(given + pair * WIDTH + column, mask=present, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + pair)
        total += value
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=present)


def grouped_product(
    x: torch.Tensor,
    pairs: SortedRows,
    weight: torch.Tensor,
    num_experts: int,
    *,
    pairs_per_row: int,
    bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_pairs, num_out] of x's dtype, of every pair in the pairs' own order.

    x: [num_pairs / pairs_per_row, num_in]; weight: contiguous [num_experts * num_out, num_in], bias: [num_experts *
    num_out] or None, both experts one after the other; factors: float32 [num_pairs], what x's rows are multiplied by
    first. Raises InvariantError for shapes that do not fit.
    """
    num_pairs, (rows, num_in) = len(pairs.order), weight.shape
    check_rows("x", x, num_in)
    if len(x) * pairs_per_row != num_pairs or rows % num_experts or not weight.is_contiguous():
        raise InvariantError(
            f"x has {len(x)} rows of {pairs_per_row} pairs each and weight {list(weight.shape)} is of {num_experts} "
            f"experts; there are {num_pairs} pairs, and all experts have the same number of outputs, contiguous"
        )
    num_out = rows // num_experts
    out = x.new_empty(num_pairs, num_out)
    if num_pairs:
        constants = grouped_constants(num_pairs, num_experts, num_out, num_in, pairs_per_row, x.dtype)
        block_m, block_n = constants["BLOCK_M"], constants["BLOCK_N"]
        grid = (min(num_pairs, num_pairs // block_m + num_experts), triton.cdiv(num_out, block_n))
        grouped_kernel[grid](x, *pairs, weight, bias, factors, out, x.stride(0), **constants)
    return out


def combined(
    given: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, top_k: int
) -> torch.Tensor:
    """given: contiguous [T * top_k, width]; weights: contiguous float32 [T, top_k], or None; shared: contiguous
    [T, width], or None -> [T, width], see `combine_kernel`."""
    num_pairs, width = given.shape
    out = given.new_empty(num_pairs // top_k, width)
    if len(out):
        grid = (len(out), triton.cdiv(width, COMBINE_ELEMENTS))
        combine_kernel[grid](given, weights, shared, out, **combine_constants(width, top_k))
    return out


def grouped_constants(
    num_pairs: int, num_experts: int, num_out: int, num_in: int, pairs_per_row: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Compile-time constants and launch options of `grouped_kernel`. Tiles grow with the pairs that an expert has on
    average: few rows take narrow tiles, so that what is multiplied in vain stays little."""
    average = num_pairs / num_experts
    block_m = 16 if average <= 16 else 32 if average <= 64 else 64
    return {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "PAIRS_PER_ROW": pairs_per_row,
        "NUM_OUT": num_out,
        "NUM_IN": num_in,
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
        "BLOCK_K": 64 if dtype.itemsize <= 2 else 32,
        # The interpreter represents bfloat16 by integers and would multiply those.
        "IN_FLOAT32": dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def combine_constants(width: int, top_k: int) -> dict[str, Any]:
    """Compile-time constants and launch options of `combine_kernel`."""
    return {"TOP_K": top_k, "WIDTH": width, "BLOCK": COMBINE_ELEMENTS, **launch_options(COMBINE_ELEMENTS)}
