"""Attention in Triton kernels: NVIDIA and AMD GPUs, and any machine in Triton's interpreter."""

from __future__ import annotations

import torch

from lamella.attention.contract import AttentionParams, LayerCache, token_major_cache
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.triton.decode import decode
from lamella.attention.triton.device import default_programs, device_arch
from lamella.attention.triton.prefill import prefill
from lamella.attention.triton.shapes import check_tables
from lamella.attention.triton.tuning import Tile, choose_tile
from lamella.attention.triton.window_indices import WindowIndices, window_kv_indices
from lamella.attention.triton.write_kv import write_kv
from lamella.attention.write_arguments import check_write
from lamella.kv_cache.spec import KVCacheSpec

SEGMENT_TOKENS = 256
MAX_SEGMENTS = 64


class TritonBackend:
    """Computes scores and sums in float32; K, V and the softmax's weights enter the matrix units in the query's dtype,
    or in float32 where the cache's differs from it and is none of 8 bits. No call waits for the device.

    segment_tokens, max_segments: decode keeps one partial result per segment of a request's context. A segment is
    `segment_tokens` times the smallest power of two with which what the request sees fits in `max_segments` of them.
    tile, target_programs: override what the tuning table and the device say; a request's decode result depends on
    neither `target_programs` nor the batch.
    """

    name = "triton"

    def __init__(
        self,
        *,
        segment_tokens: int = SEGMENT_TOKENS,
        max_segments: int = MAX_SEGMENTS,
        tile: Tile | None = None,
        target_programs: int | None = None,
    ) -> None:
        self._segment_tokens = segment_tokens
        self._max_segments = max_segments
        self._tile = tile
        self._target_programs = target_programs

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
        write_kv(cache, _rows(key), _rows(value), metadata.slot_mapping)

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Raises InvariantError where a block table starts above what its request sees."""
        if query.shape[0] == 0:
            return
        check_tables(params.spec, metadata)
        decode(
            params,
            cache,
            _rows(query),
            metadata,
            out,
            tile=self._choose_tile("decode", params, cache, query),
            segment_tokens=self._segment_tokens,
            max_segments=self._max_segments,
            target_programs=self._target_programs or default_programs(query.device),
            windows=_windows(params.spec, metadata),
        )

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Raises InvariantError where a block table starts above what its request sees."""
        if query.shape[0] == 0:
            return
        check_tables(params.spec, metadata)
        tile = self._choose_tile("prefill", params, cache, query)
        prefill(params, cache, _rows(query), metadata, out, tile=tile, first_request=metadata.num_decodes)

    def _choose_tile(self, kernel: str, params: AttentionParams, cache: LayerCache, query: torch.Tensor) -> Tile:
        if self._tile is not None:
            return self._tile
        head_dim = max(params.spec.k_dim, params.spec.v_dim)
        arch = device_arch(cache.keys.device)
        itemsize_bytes = cache.keys.element_size() if query.element_size() == 2 else query.element_size()
        return choose_tile(kernel, arch, head_dim=head_dim, itemsize_bytes=itemsize_bytes)


def _windows(spec: KVCacheSpec, metadata: AttentionMetadata) -> WindowIndices | None:
    """What the decode requests see of a windowed layer, listed by its first layer of a step for the others; None in
    full attention."""
    if spec.reach_tokens is None:
        return None
    found = metadata.memo.triton_windows.get(spec)
    if not isinstance(found, WindowIndices):
        found = metadata.memo.triton_windows[spec] = window_kv_indices(spec, metadata)
    return found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with each head's elements side by side. On CPUs, a small product may be a transposed view."""
    return x if x.stride(-1) == 1 else x.contiguous()
