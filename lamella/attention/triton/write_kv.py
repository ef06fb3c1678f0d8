"""Scatter of new K and V to their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lamella.attention.contract import LayerCache
from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.triton.device_functions import stored
from lamella.attention.triton.shapes import page_view

BLOCK_ELEMENTS = 1024


@triton.jit
def write_kv_kernel(
    key,
    value,
    keys,
    values,
    slots,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    key_page_stride,
    value_page_stride,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, block): BLOCK elements of the token's K and of its V. In a page, all heads of a token follow
    each other."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        page = slot // PAGE_TOKENS
        row = slot % PAGE_TOKENS
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

        in_key = element < NUM_KV_HEADS * K_DIM
        source = key + token * key_row_stride + (element // K_DIM) * key_head_stride + element % K_DIM
        target = keys + page * key_page_stride + row * (NUM_KV_HEADS * K_DIM) + element
        new = stored(tl.load(source, mask=in_key), keys.dtype.element_ty, FP8_MANTISSA)
        tl.store(target, new, mask=in_key)

        in_value = element < NUM_KV_HEADS * V_DIM
        source = value + token * value_row_stride + (element // V_DIM) * value_head_stride + element % V_DIM
        target = values + page * value_page_stride + row * (NUM_KV_HEADS * V_DIM) + element
        new = stored(tl.load(source, mask=in_value), values.dtype.element_ty, FP8_MANTISSA)
        tl.store(target, new, mask=in_value)


def write_kv(cache: LayerCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store key [T, heads, k_dim] and value [T, heads, v_dim] at `slots` (int64 [T], -1: nowhere), converted to the
    cache's dtype. Their last dimension is contiguous; the cache is token-major."""
    num_tokens, num_kv_heads, k_dim = key.shape
    if num_tokens == 0:
        return
    v_dim = value.shape[2]
    fp8_mantissa = FP8_MANTISSA_BITS.get(cache.keys.dtype, 0)
    grid = (num_tokens, triton.cdiv(num_kv_heads * max(k_dim, v_dim), BLOCK_ELEMENTS))
    write_kv_kernel[grid](
        key,
        value,
        page_view(cache.keys, fp8_mantissa),
        page_view(cache.values, fp8_mantissa),
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.keys.stride(0),
        cache.values.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        PAGE_TOKENS=cache.keys.shape[1],
        FP8_MANTISSA=fp8_mantissa,
        BLOCK=BLOCK_ELEMENTS,
    )
