"""The contract every attention backend fulfils, and a layer's attention by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The constants of one attention layer.

    scale multiplies q.k; softcap c (or None) turns a score s into c * tanh(s / c); sinks, float32
    [num_heads] or None, are per-head logits that join the softmax's denominator only (GPT-OSS).
    k_scale, v_scale: pages hold K / k_scale and V / v_scale, so that they lie well in the range of 8 bits. They are 1
    for KV in the model's own dtype; the native backend accepts nothing else.

    Raises ConfigError for a k_scale or v_scale that is not positive and finite.
    """

    spec: KVCacheSpec
    num_heads: int
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("k_scale", "v_scale"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value!r}: K and V are divided by it; it must be positive and finite")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of the arena. `keys[page_id]` is that page's K, in the order of its tokens.

    Where a backend lays a page out in panels, `keys[page_ids].reshape(-1, num_kv_heads, k_dim)` gives the tokens of
    pages, as it does for the plain layout. Page ids count units, so a page wider than one unit overlaps the rows of
    the ids it spans; only ids that the block manager handed out are ever used.
    """

    keys: torch.Tensor  # [num_ids, page_tokens, num_kv_heads, k_dim], strided
    values: torch.Tensor  # [num_ids, page_tokens, num_kv_heads, v_dim], strided


class AttentionBackend(Protocol):
    """Writes new K/V into pages and attends over them. Stateless between calls.

    All backends support GQA, K dim != V dim, soft-cap, sinks, any scale, sliding and chunked-local
    windows, and fp32 / fp16 / bf16 KV; all but native keep fp8, too. Garbage or NaN in masked, unwritten or null
    positions never reaches an output.
    """

    name: str

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
        """View of one layer's pages in `arena` (uint8 [bytes]): page id p starts at p * unit_bytes +
        offset_bytes and is page_tokens * spec.token_bytes long. How a page is laid out is the backend's."""
        ...

    def write_kv(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Store key [T, num_kv_heads, k_dim] and value [T, num_kv_heads, v_dim], which have been divided by
        AttentionParams' scales, at metadata.slot_mapping, as `to_kv_dtype` would convert them. Raises InvariantError,
        with nothing written, for keys, values and slots that do not fit each other or the cache."""
        ...

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attend for the first num_decodes requests: query [num_decodes, num_heads, k_dim] into
        out [num_decodes, num_heads, v_dim]. The new tokens' K/V have been written."""
        ...

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attend for the other requests, over prior context and new tokens alike: query
        [T - num_decodes, num_heads, k_dim] into out [T - num_decodes, num_heads, v_dim].

        A backend may also have `attend_all`, with the same arguments: decode and prefill in one call, query
        [T, num_heads, k_dim] into out [T, num_heads, v_dim]."""
        ...


def token_major_cache(
    arena: torch.Tensor, *, spec: KVCacheSpec, dtype: torch.dtype, page_tokens: int, unit_bytes: int, offset_bytes: int
) -> LayerCache:
    """The plain page layout: K as [page_tokens, heads, k_dim], then V as [page_tokens, heads, v_dim]."""
    elements = arena.view(dtype)
    itemsize = dtype.itemsize
    unit = unit_bytes // itemsize
    start = offset_bytes // itemsize
    k_page = page_tokens * spec.num_kv_heads * spec.k_dim
    v_page = page_tokens * spec.num_kv_heads * spec.v_dim
    num_ids = (elements.numel() - start - k_page - v_page) // unit + 1

    def view(dim: int, offset: int) -> torch.Tensor:
        size = (num_ids, page_tokens, spec.num_kv_heads, dim)
        return elements.as_strided(size, (unit, spec.num_kv_heads * dim, dim, 1), offset)

    return LayerCache(keys=view(spec.k_dim, start), values=view(spec.v_dim, start + k_page))


def attend(
    backend: AttentionBackend,
    params: AttentionParams,
    cache: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    metadata: AttentionMetadata,
    *,
    queries: AttentionMetadata | None = None,
) -> torch.Tensor:
    """One layer's attention for a mixed batch: write the new K/V, then decode rows, then prefill rows.

    query [T, num_heads, k_dim], key [T, num_kv_heads, k_dim], value [T, num_kv_heads, v_dim] ->
    [T, num_heads, v_dim]. key and value None: the layer has no KV of its own, and `cache` is that of an earlier layer
    which has written this step's tokens. queries: the metadata of the tokens in `query`, where K and V are of more
    tokens. Raises InvariantError where only one of K and V is given, or `query` has not one row for each token.
    """
    if (key is None) != (value is None):
        raise InvariantError("attention got only one of K and V; pass both, or neither for a layer that shares KV")
    if key is not None and value is not None:
        # Divide in float32: a quotient in 16 bits would be rounded twice, here and when it is stored.
        if params.k_scale != 1.0:
            key = key.float() / params.k_scale
        if params.v_scale != 1.0:
            value = value.float() / params.v_scale
        backend.write_kv(cache, key, value, metadata)
    if queries is not None:
        metadata = queries
    if query.shape[0] != metadata.num_tokens:
        raise InvariantError(
            f"attention got queries of {query.shape[0]} tokens and metadata of {metadata.num_tokens}; "
            "pass one query for each token"
        )
    out = query.new_empty(query.shape[0], params.num_heads, params.spec.v_dim)
    attend_all = getattr(backend, "attend_all", None)
    if attend_all is not None:
        attend_all(params, cache, query, metadata, out)
        return out
    num_decodes = metadata.num_decodes
    if num_decodes:
        backend.decode(params, cache, query[:num_decodes], metadata, out[:num_decodes])
    if num_decodes < metadata.num_requests:
        backend.prefill(params, cache, query[num_decodes:], metadata, out[num_decodes:])
    return out
