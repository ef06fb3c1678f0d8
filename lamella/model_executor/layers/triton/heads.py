"""From a fused QKV projection to queries and pages in one pass: norms of heads, rotary embedding, the write of K and V.

The projection is read once. Keys and values never exist outside their pages. Arithmetic is in float32; what is stored
is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lamella.attention.contract import LayerCache
from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.native_backend import HeadTransform
from lamella.attention.triton.device_functions import stored
from lamella.attention.triton.shapes import page_view
from lamella.errors import InvariantError
from lamella.model_executor.layers.triton.rows import check_rows, launch_options

TILE_ELEMENTS = 2048  # most that a program takes of Q or of K, in whole heads


@triton.jit
def as_stored(x, target, scale, FP8_MANTISSA: tl.constexpr):
    """float32 `x`, divided by `scale` unless that is None, as the memory at `target` keeps it."""
    if scale is not None:
        x = tl.div_rn(x, scale)
    return stored(x, target.dtype.element_ty, FP8_MANTISSA)


@triton.jit
def move_heads(
    source,
    target,
    tile,
    weight,
    cos,
    sin,
    eps,
    scale,
    FP8_MANTISSA: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Of NUM heads that follow each other at `source` and at `target`, the TILE from tile * TILE on: each normed, its
    first half rotated against the second, and stored as `as_stored` has it."""
    half: tl.constexpr = DIM // 2
    head = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, HALF_PADDED)
    in_half = column < half
    mask = (head < NUM)[:, None] & in_half[None, :]
    offsets = head[:, None] * DIM + column[None, :]
    first = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + offsets + half, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(first * first + second * second, 1) / DIM + eps)[:, None]
    first = first * factor * tl.load(weight + column, mask=in_half, other=0.0)[None, :]
    second = second * factor * tl.load(weight + half + column, mask=in_half, other=0.0)[None, :]
    c = tl.load(cos + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
    tl.store(target + offsets, as_stored(first * c - second * s, target, scale, FP8_MANTISSA), mask=mask)
    tl.store(target + offsets + half, as_stored(second * c + first * s, target, scale, FP8_MANTISSA), mask=mask)


@triton.jit(do_not_specialize_on_alignment=("slots",))
def heads_kernel(
    columns,
    query_weight,
    key_weight,
    cos,
    sin,
    query,
    keys,
    values,
    slots,
    eps,
    key_scale,
    value_scale,
    row_stride,
    rotary_row_stride,
    key_page_stride,
    value_page_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    """Program (token, tile): QUERY_TILE query heads, or after all of them KV_TILE heads of K and V.

    A row of `columns` is Q [NUM_HEADS, DIM], K [NUM_KV_HEADS, DIM], V [NUM_KV_HEADS, DIM]; either number may be 0. In a
    page, all heads of a token follow each other.
    """
    query_tiles: tl.constexpr = (NUM_HEADS + QUERY_TILE - 1) // QUERY_TILE
    query_size: tl.constexpr = NUM_HEADS * DIM
    key_size: tl.constexpr = NUM_KV_HEADS * DIM
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = columns + token * row_stride
    cos += token * rotary_row_stride
    sin += token * rotary_row_stride
    if tile < query_tiles:
        target = query + token * query_size
        move_heads(row, target, tile, query_weight, cos, sin, eps, None, 0, NUM_HEADS, QUERY_TILE, DIM, HALF_PADDED)
    elif NUM_KV_HEADS > 0:
        slot = tl.load(slots + token)  # 64 bits: an arena may have more than 2^31 elements
        if slot >= 0:
            tile -= query_tiles
            page = slot // PAGE_TOKENS
            in_page = slot % PAGE_TOKENS * key_size
            key_row = keys + page * key_page_stride + in_page
            source = row + query_size
            move_heads(
                source,
                key_row,
                tile,
                key_weight,
                cos,
                sin,
                eps,
                key_scale,
                FP8_MANTISSA,
                NUM_KV_HEADS,
                KV_TILE,
                DIM,
                HALF_PADDED,
            )
            in_tile = tl.arange(0, VALUE_BLOCK)
            element = tile * (KV_TILE * DIM) + in_tile
            present = (in_tile < KV_TILE * DIM) & (element < key_size)
            value = tl.load(source + key_size + element, mask=present, other=0.0).to(tl.float32)
            value_row = values + page * value_page_stride + in_page
            tl.store(value_row + element, as_stored(value, value_row, value_scale, FP8_MANTISSA), mask=present)


def transform_heads(
    columns: torch.Tensor,
    transform: HeadTransform,
    *,
    num_heads: int,
    num_kv_heads: int,
    cache: LayerCache,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Norm and rotate the heads of `columns` [T, (num_heads + 2 * num_kv_heads) * head_dim], Q, K and V side by side;
    write K and V to `slots` (int64 [T], -1: nowhere) and return the queries, contiguous [T, num_heads, head_dim] of
    its dtype.

    Rows may lie apart. num_heads 0: K and V alone; num_kv_heads 0: queries alone, and nothing is written. The cache is
    token-major, of any float dtype; it gets K / k_scale and V / v_scale, in 8 bits at most the largest finite number.
    cos and sin cover whole heads: [T, 1, head_dim / 2]. Raises InvariantError for other shapes.
    """
    head_dim = 2 * transform.cos.shape[-1]
    check_rows("columns", columns, (num_heads + 2 * num_kv_heads) * head_dim)
    num_tokens = columns.shape[0]
    _check_transform(transform, head_dim, num_tokens)
    if num_kv_heads:
        _check_pages(cache, num_kv_heads, head_dim)
        if tuple(slots.shape) != (num_tokens,):
            raise InvariantError(f"there are {list(slots.shape)} slots for {num_tokens} tokens; give one for each")
    query = columns.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        fp8_mantissa = FP8_MANTISSA_BITS.get(cache.keys.dtype, 0)
        constants = heads_constants(
            num_heads, num_kv_heads, head_dim, page_tokens=cache.keys.shape[1], fp8_mantissa=fp8_mantissa
        )
        heads_kernel[(num_tokens, num_tiles(constants))](
            columns,
            transform.query_norm,
            transform.key_norm,
            transform.cos,
            transform.sin,
            query,
            page_view(cache.keys, fp8_mantissa),
            page_view(cache.values, fp8_mantissa),
            slots,
            transform.eps,
            None if k_scale == 1.0 else k_scale,
            None if v_scale == 1.0 else v_scale,
            columns.stride(0),
            transform.cos.stride(0),
            cache.keys.stride(0),
            cache.values.stride(0),
            **constants,
        )
    return query


def heads_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, *, page_tokens: int, fp8_mantissa: int = 0
) -> dict[str, Any]:
    """Compile-time constants and launch options of `heads_kernel`. fp8_mantissa: FP8_MANTISSA of the attention
    kernels."""
    half_padded = triton.next_power_of_2(head_dim // 2)

    def tile(num: int) -> int:
        """Heads of a program: no more than there are, nor than fit; one where there are none."""
        return min(triton.next_power_of_2(max(1, num)), max(1, TILE_ELEMENTS // (2 * half_padded)))

    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": head_dim,
        "HALF_PADDED": half_padded,
        "QUERY_TILE": tile(num_heads),
        "KV_TILE": tile(num_kv_heads),
        "VALUE_BLOCK": triton.next_power_of_2(tile(num_kv_heads) * head_dim),
        "PAGE_TOKENS": page_tokens,
        "FP8_MANTISSA": fp8_mantissa,
        **launch_options(2 * half_padded * max(tile(num_heads), tile(num_kv_heads))),
    }


def num_tiles(constants: dict[str, Any]) -> int:
    """Programs of `heads_kernel` for each token."""
    return triton.cdiv(constants["NUM_HEADS"], constants["QUERY_TILE"]) + triton.cdiv(
        constants["NUM_KV_HEADS"], constants["KV_TILE"]
    )


def _check_transform(transform: HeadTransform, head_dim: int, num_tokens: int) -> None:
    for name, table in (("cos", transform.cos), ("sin", transform.sin)):
        if tuple(table.shape) != (num_tokens, 1, head_dim // 2) or table.stride(2) != 1:
            raise InvariantError(
                f"{name} has shape {list(table.shape)}; the kernel takes [{num_tokens}, 1, {head_dim // 2}]"
            )
    if transform.cos.stride(0) != transform.sin.stride(0):
        raise InvariantError("cos and sin have rows of different strides; make both the same way")
    for name, weight in (("query_norm", transform.query_norm), ("key_norm", transform.key_norm)):
        if weight is None or tuple(weight.shape) != (head_dim,) or weight.dtype != torch.float32:
            given = "None" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise InvariantError(f"{name} is {given}; the kernel norms every head: give float32 [{head_dim}]")


def _check_pages(cache: LayerCache, num_kv_heads: int, head_dim: int) -> None:
    for name, pages in (("keys", cache.keys), ("values", cache.values)):
        if tuple(pages.shape[2:]) != (num_kv_heads, head_dim) or pages.stride()[1:] != (
            num_kv_heads * head_dim,
            head_dim,
            1,
        ):
            raise InvariantError(
                f"pages of {name} have shape {list(pages.shape)} and strides {pages.stride()}; the kernel writes "
                f"token-major pages of {num_kv_heads} heads of {head_dim}"
            )
