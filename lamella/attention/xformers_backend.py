"""Attention by xformers' `memory_efficient_attention_forward`, on CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lamella.attention.contract import AttentionBackend, AttentionParams, LayerCache, token_major_cache
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.xformers_masks import PAGED_TOKENS, pack_keys, paged_mask
from lamella.kv_cache.spec import KVCacheSpec

logger = logging.getLogger(__name__)

# What xformers' paged kernel asks for, beside pages of a multiple of PAGED_TOKENS.
PAGED_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
PAGED_DTYPES = (torch.float16, torch.bfloat16)
PAGED_MAX_ROWS = 2**31

# (query, key, value, *, attn_bias, scale, op) -> out, as memory_efficient_attention_forward
Operator = Callable[..., torch.Tensor]


class XformersBackend:
    """Gathers the keys that a batch sees, in a sliding layer only those of the window, and attends under a
    block-diagonal mask. Decodes read pages in place where the layer's layout allows it (`pages_per_id`).

    What xformers cannot express is left to `other`, as is the writing of K and V; the log says each reason once. A
    value that is not a number reaches every query of its request's prefill, not only those that see it. The number of
    keys and the mask change from step to step, so no CUDA graph can hold a call.

    operator: what to call in place of `memory_efficient_attention_forward`. other: what to use in place of
    TritonBackend.
    """

    name = "xformers"

    def __init__(self, operator: Operator | None = None, other: AttentionBackend | None = None) -> None:
        if operator is None:
            from xformers.ops import memory_efficient_attention_forward

            operator = memory_efficient_attention_forward
        if other is None:
            from lamella.attention.triton.backend import TritonBackend

            other = TritonBackend()
        self._operator = operator
        self._other = other
        self._logged: set[str] = set()
        self._refused: set[tuple[Any, ...]] = set()
        self._reads_pages = True

    def layer_cache(
        self,
        arena: torch.Tensor,
        *,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        page_tokens: int,
        unit_bytes: int,
        offset_bytes: int,
    ) -> LayerCache:
        return token_major_cache(
            arena, spec=spec, dtype=dtype, page_tokens=page_tokens, unit_bytes=unit_bytes, offset_bytes=offset_bytes
        )

    def write_kv(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._other.write_kv(cache, key, value, metadata)

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Raises InvariantError where a block table starts above what its request sees."""
        requests = range(metadata.num_decodes)
        if not self._attend(params, cache, query, metadata, requests, out):
            self._other.decode(params, cache, query, metadata, out)

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Raises InvariantError where a block table starts above what its request sees."""
        requests = range(metadata.num_decodes, metadata.num_requests)
        if not self._attend(params, cache, query, metadata, requests, out):
            self._other.prefill(params, cache, query, metadata, out)

    def _attend(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        requests: range,
        out: torch.Tensor,
    ) -> bool:
        """query and out hold the rows of `requests`. False: xformers cannot do it, and nothing was done."""
        spec = params.spec
        reason = inexpressible(params, cache)
        if reason is not None:
            self._log_once(reason)
            return False
        shape = (spec.k_dim, spec.v_dim, query.dtype)
        if shape in self._refused:
            return False
        if not len(requests):
            return True
        try:
            is_decode = requests.stop == metadata.num_decodes
            if not (is_decode and self._decode_on_pages(params, cache, query, metadata, out)):
                self._attend_gathered(params, cache, query, metadata, requests, out)
        # Whether xformers has an operator for this device and shape shows only when it is called.
        except NotImplementedError:
            self._refused.add(shape)
            self._log_once(
                f"none of its operators takes heads of {spec.k_dim} and {spec.v_dim} dimensions in {query.dtype} on "
                f"{query.device}"
            )
            return False
        return True

    def _attend_gathered(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        requests: range,
        out: torch.Tensor,
    ) -> None:
        key, found = (params.spec, requests), metadata.memo.xformers_packed
        packed = found.get(key)
        if packed is None:
            packed = found[key] = pack_keys(params.spec, metadata, requests)
        keys = cache.keys[packed.page_ids, packed.offsets].to(query.dtype)  # [num_keys, num_kv_heads, k_dim]
        values = cache.values[packed.page_ids, packed.offsets].to(query.dtype)
        self._run(params, query, keys, values, packed.mask, out)

    def _decode_on_pages(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> bool:
        """False: the layout or the batch does not allow it."""
        if not self._reads_pages or query.dtype != cache.keys.dtype or query.dtype not in PAGED_DTYPES:
            return False
        stride = pages_per_id(cache)
        if stride is None or not _has_paged_kernel(query.device):
            return False
        key, masks = (params.spec, stride), metadata.memo.xformers_paged
        if key not in masks:
            masks[key] = paged_mask(params.spec, metadata, stride)
        mask = masks[key]
        if mask is None:
            return False
        from triton import __version__ as triton_version
        from triton.errors import TritonError
        from xformers.ops.fmha.triton_splitk import FwOp

        try:
            self._run(params, query, page_rows(cache.keys), page_rows(cache.values), mask, out, op=FwOp)
        except TritonError:  # xformers 0.0.35 writes this kernel with block pointers, which Triton 3.9 no longer has
            self._reads_pages = False
            logger.warning(
                "attention by xformers gathers keys in place of reading pages: its paged kernel does not compile with "
                "triton %s",
                triton_version,
            )
        return self._reads_pages

    def _run(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: Any,
        out: torch.Tensor,
        op: Any = None,
    ) -> None:
        """query [n, num_heads, k_dim], keys and values [num_keys, num_kv_heads, dim]. With several query heads to a KV
        head, all three get an axis of groups, over which K and V are expanded, not copied."""
        query = query if query.stride(-1) == 1 else query.contiguous()
        num_kv_heads = params.spec.num_kv_heads
        group = params.num_heads // num_kv_heads
        if group > 1:
            query = query.unflatten(1, (num_kv_heads, group))
            keys = keys.unsqueeze(2).expand(-1, -1, group, -1)
            values = values.unsqueeze(2).expand(-1, -1, group, -1)
        result = self._operator(query[None], keys[None], values[None], attn_bias=mask, scale=params.scale, op=op)
        out.copy_(result.reshape(out.shape))

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("attention by %s instead of xformers: %s", self._other.name, reason)


def inexpressible(params: AttentionParams, cache: LayerCache) -> str | None:
    """Why no mask of xformers expresses the layer; None if one does."""
    if params.sinks is not None:
        return "its masks have no attention sinks"
    if params.softcap is not None:
        return "its masks have no soft-cap"
    if cache.keys.dtype.itemsize == 1:
        return f"it cannot read KV in {cache.keys.dtype} with one scale a layer"
    return None


def pages_per_id(cache: LayerCache) -> int | None:
    """How many pages of K lie between two page ids, where xformers can read pages in place; None where not.

    Its paged masks take K as one array of pages without gaps, and V likewise, both with the same table. In the arena, K
    and V of a page lie beside those of other layers. So this works where K and V of a page have equal sizes and a unit
    is a whole number of them. Then the array is the arena itself, from the layer's first page on, and the table counts
    in steps of that size.
    """
    _, page_tokens, _, dim = cache.keys.shape
    page_elements = cache.keys[0].numel()
    if page_tokens % PAGED_TOKENS or dim not in PAGED_HEAD_DIMS or cache.keys.shape != cache.values.shape:
        return None
    if cache.keys.stride(0) % page_elements:
        return None
    stride = cache.keys.stride(0) // page_elements
    return stride if cache.keys.shape[0] * stride * page_tokens < PAGED_MAX_ROWS else None


def page_rows(pages: torch.Tensor) -> torch.Tensor:
    """K or V [num_ids, page_tokens, heads, dim] as all rows of the arena from the first page on, [num_rows, heads,
    dim]. Rows that are not this layer's are among them."""
    num_ids, page_tokens, num_heads, dim = pages.shape
    row = num_heads * dim
    num_rows = (num_ids - 1) * (pages.stride(0) // row) + page_tokens
    return pages.as_strided((num_rows, num_heads, dim), (row, dim, 1))


def _has_paged_kernel(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
