"""From a fused QKV projection to queries and pages in one pass: bias, norms of heads, rotary embedding, the write of K
and V.

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
from lamella.model_executor.layers.triton.rows import check_bias, check_rows, launch_options

TILE_ELEMENTS = 2048  # most that a program takes of Q or of K, in whole heads


@triton.jit
def as_stored(x, target, scale, FP8_MANTISSA: tl.constexpr):
    """float32 `x`, divided by `scale` unless that is None, as the memory at `target` keeps it."""
    if scale is not None:
        x = tl.div_rn(x, scale)
    return stored(x, target.dtype.element_ty, FP8_MANTISSA)


@triton.jit
def with_bias(x, bias, offsets, mask):
    """x plus the biases at `offsets`, unless there are none."""
    if bias is not None:
        x += tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def move_heads(
    source,
    bias,
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
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    """Of NUM heads that follow each other at `source` and at `target`, the TILE from tile * TILE on: each with its bias
    added, normed, its first HALF elements rotated against the next HALF, and stored as `as_stored` has it. A step whose
    argument is None is left out. Elements beyond 2 * HALF are not rotated; REST_PADDED is 0 where there are none."""
    head = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, HALF_PADDED)
    in_half = column < HALF
    mask = (head < NUM)[:, None] & in_half[None, :]
    offsets = head[:, None] * DIM + column[None, :]
    first = with_bias(tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32), bias, offsets, mask)
    second = with_bias(
        tl.load(source + offsets + HALF, mask=mask, other=0.0).to(tl.float32), bias, offsets + HALF, mask
    )
    if REST_PADDED > 0:
        rest_column = 2 * HALF + tl.arange(0, REST_PADDED)
        in_rest = rest_column < DIM
        rest_mask = (head < NUM)[:, None] & in_rest[None, :]
        rest_offsets = head[:, None] * DIM + rest_column[None, :]
        rest = tl.load(source + rest_offsets, mask=rest_mask, other=0.0).to(tl.float32)
        rest = with_bias(rest, bias, rest_offsets, rest_mask)
    if weight is not None:
        squares = tl.sum(first * first + second * second, 1)
        if REST_PADDED > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        first = first * factor * tl.load(weight + column, mask=in_half, other=0.0)[None, :]
        second = second * factor * tl.load(weight + HALF + column, mask=in_half, other=0.0)[None, :]
        if REST_PADDED > 0:
            rest = rest * factor * tl.load(weight + rest_column, mask=in_rest, other=0.0)[None, :]
    if cos is None:
        tl.store(target + offsets, as_stored(first, target, scale, FP8_MANTISSA), mask=mask)
        tl.store(target + offsets + HALF, as_stored(second, target, scale, FP8_MANTISSA), mask=mask)
    else:
        c = tl.load(cos + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + column, mask=in_half, other=0.0).to(tl.float32)[None, :]
        tl.store(target + offsets, as_stored(first * c - second * s, target, scale, FP8_MANTISSA), mask=mask)
        tl.store(target + offsets + HALF, as_stored(second * c + first * s, target, scale, FP8_MANTISSA), mask=mask)
    if REST_PADDED > 0:
        tl.store(target + rest_offsets, as_stored(rest, target, scale, FP8_MANTISSA), mask=rest_mask)


@triton.jit(do_not_specialize_on_alignment=("slots",))
def heads_kernel(
    columns,
    bias,
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
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    """Program (token, tile): QUERY_TILE query heads, or after all of them KV_TILE heads of K and V.

    A row of `columns`, and `bias`, is Q [NUM_HEADS, DIM], K [NUM_KV_HEADS, DIM], V [NUM_KV_HEADS, VALUE_DIM]; either
    number may be 0. In a page, all heads of a token follow each other. bias, the norms' weights, and cos with sin may
    each be None: that step is left out.
    """
    query_tiles: tl.constexpr = (NUM_HEADS + QUERY_TILE - 1) // QUERY_TILE
    query_size: tl.constexpr = NUM_HEADS * DIM
    key_size: tl.constexpr = NUM_KV_HEADS * DIM
    value_size: tl.constexpr = NUM_KV_HEADS * VALUE_DIM
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = columns + token * row_stride
    if cos is not None:
        cos += token * rotary_row_stride
        sin += token * rotary_row_stride
    if tile < query_tiles:
        target = query + token * query_size
        move_heads(
            row,
            bias,
            target,
            tile,
            query_weight,
            cos,
            sin,
            eps,
            None,
            0,
            NUM_HEADS,
            QUERY_TILE,
            DIM,
            HALF,
            HALF_PADDED,
            REST_PADDED,
        )
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
                bias if bias is None else bias + query_size,
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
                HALF,
                HALF_PADDED,
                REST_PADDED,
            )
            in_tile = tl.arange(0, VALUE_BLOCK)
            element = tile * (KV_TILE * VALUE_DIM) + in_tile
            present = (in_tile < KV_TILE * VALUE_DIM) & (element < value_size)
            value = tl.load(source + key_size + element, mask=present, other=0.0).to(tl.float32)
            value = with_bias(value, bias, query_size + key_size + element, present)
            if VALUE_DIM != DIM:
                in_page = slot % PAGE_TOKENS * value_size
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
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate the heads of `columns` [T, num_heads * k_dim + num_kv_heads * (k_dim + v_dim)], Q, K and V side
    by side; write K and V to `slots` (int64 [T], -1: nowhere) and return the queries, contiguous [T, num_heads, k_dim]
    of its dtype. The sizes of heads are those of the cache.

    bias: of the projection that made `columns`, a number for each of them, added before all else. Rows may lie apart.
    num_heads 0: K and V alone; num_kv_heads 0: queries alone, and nothing is written. The cache is token-major, of any
    float dtype; it gets K / k_scale and V / v_scale, in 8 bits at most the largest finite number. cos and sin cover the
    first 2 * n dimensions of a head, [T, 1, n]; the rest of it stays. What is None in `transform` is left out. Raises
    InvariantError for other shapes.
    """
    k_dim, v_dim = cache.keys.shape[-1], cache.values.shape[-1]
    check_rows("columns", columns, num_heads * k_dim + num_kv_heads * (k_dim + v_dim))
    num_tokens, num_columns = columns.shape
    rotary_dim = _check_transform(transform, k_dim, num_tokens)
    check_bias("bias", bias, num_columns)
    if num_kv_heads:
        _check_pages(cache, num_kv_heads)
        if tuple(slots.shape) != (num_tokens,):
            raise InvariantError(f"there are {list(slots.shape)} slots for {num_tokens} tokens; give one for each")
    query = columns.new_empty(num_tokens, num_heads, k_dim)
    if num_tokens:
        fp8_mantissa = FP8_MANTISSA_BITS.get(cache.keys.dtype, 0)
        constants = heads_constants(
            num_heads,
            num_kv_heads,
            k_dim,
            page_tokens=cache.keys.shape[1],
            fp8_mantissa=fp8_mantissa,
            v_dim=v_dim,
            rotary_dim=rotary_dim,
        )
        heads_kernel[(num_tokens, num_tiles(constants))](
            columns,
            bias,
            transform.query_norm,
            transform.key_norm,
            transform.cos if rotary_dim else None,
            transform.sin if rotary_dim else None,
            query,
            page_view(cache.keys, fp8_mantissa),
            page_view(cache.values, fp8_mantissa),
            slots,
            transform.eps,
            None if k_scale == 1.0 else k_scale,
            None if v_scale == 1.0 else v_scale,
            columns.stride(0),
            0 if transform.cos is None else transform.cos.stride(0),
            cache.keys.stride(0),
            cache.values.stride(0),
            **constants,
        )
    return query


def heads_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    page_tokens: int,
    fp8_mantissa: int = 0,
    v_dim: int | None = None,
    rotary_dim: int | None = None,
) -> dict[str, Any]:
    """Compile-time constants and launch options of `heads_kernel`. head_dim: of Q and K, and where v_dim is None of V.
    rotary_dim: the dimensions that are rotated; None: all. fp8_mantissa: FP8_MANTISSA of the attention kernels."""
    v_dim = head_dim if v_dim is None else v_dim
    # Heads that are not rotated are moved in two halves as well, so that there is one kernel.
    half = (rotary_dim or head_dim) // 2
    rest = head_dim - 2 * half
    half_padded = triton.next_power_of_2(half)
    rest_padded = triton.next_power_of_2(rest) if rest else 0
    key_padded = 2 * half_padded + rest_padded
    head_padded = max(key_padded, triton.next_power_of_2(v_dim))

    def tile(num: int, padded: int) -> int:
        """Heads of a program: no more than there are, nor than fit; one where there are none."""
        most = 1 << (max(1, TILE_ELEMENTS // padded).bit_length() - 1)
        return min(triton.next_power_of_2(max(1, num)), most)

    query_tile, kv_tile = tile(num_heads, key_padded), tile(num_kv_heads, head_padded)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": head_dim,
        "VALUE_DIM": v_dim,
        "HALF": half,
        "HALF_PADDED": half_padded,
        "REST_PADDED": rest_padded,
        "QUERY_TILE": query_tile,
        "KV_TILE": kv_tile,
        "VALUE_BLOCK": triton.next_power_of_2(kv_tile * v_dim),
        "PAGE_TOKENS": page_tokens,
        "FP8_MANTISSA": fp8_mantissa,
        **launch_options(triton.next_power_of_2(max(query_tile * key_padded, kv_tile * head_padded))),
    }


def num_tiles(constants: dict[str, Any]) -> int:
    """Programs of `heads_kernel` for each token."""
    return triton.cdiv(constants["NUM_HEADS"], constants["QUERY_TILE"]) + triton.cdiv(
        constants["NUM_KV_HEADS"], constants["KV_TILE"]
    )


def _check_transform(transform: HeadTransform, head_dim: int, num_tokens: int) -> int:
    """Returns how many dimensions are rotated."""
    for name, weight in (("query_norm", transform.query_norm), ("key_norm", transform.key_norm)):
        if weight is not None and (tuple(weight.shape) != (head_dim,) or weight.dtype != torch.float32):
            raise InvariantError(
                f"{name} is {weight.dtype} {list(weight.shape)}; the kernel takes float32 [{head_dim}], or None"
            )
    cos, sin = transform.cos, transform.sin
    if cos is None and sin is None:
        half = 0
    elif cos is None or sin is None:
        raise InvariantError(f"{'cos' if cos is None else 'sin'} is None and the other is not; give both or neither")
    else:
        half = cos.shape[-1]
        for name, table in (("cos", cos), ("sin", sin)):
            if (
                tuple(table.shape) != (num_tokens, 1, half)
                or 2 * half > head_dim
                or (half > 1 and table.stride(2) != 1)
            ):
                raise InvariantError(
                    f"{name} has shape {list(table.shape)}; the kernel takes [{num_tokens}, 1, n], the same n for both "
                    f"and at most {head_dim // 2}, n values side by side"
                )
        if cos.stride(0) != sin.stride(0):
            raise InvariantError("cos and sin have rows of different strides; make both the same way")
    if head_dim % 2:
        raise InvariantError(f"heads of {head_dim} have no halves; the kernel takes even ones")
    return 2 * half


def _check_pages(cache: LayerCache, num_kv_heads: int) -> None:
    for name, pages in (("keys", cache.keys), ("values", cache.values)):
        dim = pages.shape[-1]
        if pages.dim() != 4 or pages.shape[2] != num_kv_heads or pages.stride()[1:] != (num_kv_heads * dim, dim, 1):
            raise InvariantError(
                f"pages of {name} have shape {list(pages.shape)} and strides {pages.stride()}; the kernel writes "
                f"token-major pages of {num_kv_heads} heads of {dim}"
            )
