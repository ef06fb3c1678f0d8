"""Attention in eager PyTorch: the token-major page layout and KV writes. Decode and prefill have files of their own."""

from __future__ import annotations

import dataclasses

import torch

from lamella.attention.contract import AttentionParams, LayerCache, token_major_cache
from lamella.attention.kv_dtype import to_kv_dtype
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.torch_decode import decode
from lamella.attention.torch_plans import WriteTargets
from lamella.attention.torch_prefill import prefill
from lamella.attention.write_arguments import check_write
from lamella.kv_cache.spec import KVCacheSpec


class TorchBackend:
    """Runs on any device that torch has; tuned for CPU. Computes in float32 whatever the KV dtype.

    A windowed layer costs O(window) per token: decode gathers the window's pages, prefill works in
    bands of queries. What depends on the metadata alone is computed by a group's first layer and
    kept in `metadata.memo` for the others.
    """

    name = "torch"

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
        check_write(cache, key, value, metadata)
        targets = _write_targets(metadata)
        if targets.tokens is not None:
            key = key[targets.tokens]
            value = value[targets.tokens]
        # Where a page spans several ids the view overlaps itself. Pages in use never overlap, so what is written stays
        # right.
        places = targets.page_ids, targets.offsets
        cache.keys.index_put_(places, to_kv_dtype(key, cache.keys.dtype))
        cache.values.index_put_(places, to_kv_dtype(value, cache.values.dtype))

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        decode(_k_scale_folded(params), cache, query, metadata, out)
        _multiply_by_v_scale(out, params)

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        prefill(_k_scale_folded(params), cache, query, metadata, out)
        _multiply_by_v_scale(out, params)


def _k_scale_folded(params: AttentionParams) -> AttentionParams:
    """Params with k_scale moved into the scale: they give the same scores from K as it is stored."""
    if params.k_scale == 1.0:
        return params
    return dataclasses.replace(params, scale=params.scale * params.k_scale, k_scale=1.0)


def _multiply_by_v_scale(out: torch.Tensor, params: AttentionParams) -> None:
    if params.v_scale != 1.0:
        out.mul_(params.v_scale)


def _write_targets(metadata: AttentionMetadata) -> WriteTargets:
    targets = metadata.memo.torch_write
    if targets is None:
        slots = metadata.slot_mapping
        tokens = None
        if (slots < 0).any():
            tokens = (slots >= 0).nonzero()[:, 0]
            slots = slots[tokens]
        targets = WriteTargets(tokens, slots // metadata.page_tokens, slots % metadata.page_tokens)
        metadata.memo.torch_write = targets
    return targets
