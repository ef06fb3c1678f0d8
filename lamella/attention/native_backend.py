"""Attention by the compiled CPU kernels: pages of panels, one kernel for decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.attention.metadata import AttentionMetadata
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.native.attention import AttentionKernels, Batch, HeldBatch, Pages
from lamella.native.decoder import DecoderWeights, LayerStep, PagedLayer, Visibility
from lamella.native.library import PANEL

# Most rows of a tile (query heads of a KV head, times queries): their sums and scores fit the second-level cache.
TILE_ROWS = 96


@dataclass(frozen=True, slots=True)
class NativeLayerCache(LayerCache):
    """keys [num_ids, sub_pages, 16, num_kv_heads, k_dim] and values [num_ids, sub_pages, 16, num_kv_heads,
    v_dim / 16, 16]: views in the order of tokens, so `keys[page_ids].reshape(-1, num_kv_heads, k_dim)` are the
    tokens of pages."""

    pages: Pages


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What turns projections into queries and keys, token by token: an RMS norm of each head (weights float32 [k_dim],
    or None for no norm), then rotary embedding of its first rotary_dim dimensions, half against half (cos and sin,
    float32 [T, 1, rotary_dim / 2], or None for none)."""

    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    eps: float
    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def of_rows(self, rows: torch.Tensor) -> HeadTransform:
        """The same for the tokens `rows` (int64 [S])."""
        if self.cos is None or self.sin is None:
            return self
        return replace(self, cos=self.cos[rows], sin=self.sin[rows])


def native_supports(spec: KVCacheSpec, dtype: torch.dtype, page_tokens: int) -> str | None:
    """Why the native backend cannot keep such KV; None: it can."""
    if dtype != torch.float32:
        return f"KV is {dtype}, and the kernels read float32"
    if page_tokens % PANEL:
        return f"page_size={page_tokens} is no multiple of {PANEL}"
    if spec.v_dim % PANEL or spec.k_dim % PANEL:
        return f"heads of {spec.k_dim} (K) and {spec.v_dim} (V) are no multiples of {PANEL}"
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        return f"the kernels do not know the visibility rule of {type(spec).__name__}"
    return None


class NativeBackend:
    """Bit for bit the same result for a row whatever the batch, the chunk, the page size and the threads.

    float32 on the CPU. The cost of a query is the number of keys that it sees, rounded up to 16. What depends on the
    metadata alone is kept in `metadata.memo` for the group's other layers.
    """

    name = "native"

    def __init__(self, kernels: AttentionKernels) -> None:
        self.kernels = kernels

    def layer_cache(
        self,
        arena: torch.Tensor,
        *,
        spec: KVCacheSpec,
        dtype: torch.dtype,
        page_tokens: int,
        unit_bytes: int,
        offset_bytes: int,
    ) -> NativeLayerCache:
        """See AttentionBackend.layer_cache. Raises ConfigError where `native_supports` says why not."""
        reason = native_supports(spec, dtype, page_tokens)
        if reason is not None:
            raise ConfigError(f"attention_backend='native' can't be used: {reason}; 'torch' would work")
        elements = arena.view(dtype)
        unit = unit_bytes // dtype.itemsize
        start = offset_bytes // dtype.itemsize
        heads, k_dim, v_dim = spec.num_kv_heads, spec.k_dim, spec.v_dim
        sub_pages = page_tokens // PANEL
        k_page = page_tokens * heads * k_dim
        num_ids = (elements.numel() - start - k_page - page_tokens * heads * v_dim) // unit + 1
        k_panel, v_panels = PANEL * k_dim, PANEL * v_dim
        keys = elements.as_strided(
            (num_ids, sub_pages, PANEL, heads, k_dim), (unit, k_panel, 1, sub_pages * k_panel, PANEL), start
        )
        values = elements.as_strided(
            (num_ids, sub_pages, PANEL, heads, v_dim // PANEL, PANEL),
            (unit, v_panels, PANEL, sub_pages * v_panels, PANEL * PANEL, 1),
            start + k_page,
        )
        pages = Pages(keys.data_ptr(), values.data_ptr(), unit, page_tokens, heads, k_dim, v_dim, num_ids)
        return NativeLayerCache(keys, values, pages)

    def write_kv(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        self.kernels.write_kv(_pages(cache), key, value, metadata.slot_mapping)

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        self._attend(params, cache, query, metadata, out, 0, metadata.num_decodes)

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        self._attend(params, cache, query, metadata, out, metadata.num_decodes, metadata.num_requests)

    def attend_all(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Decode rows and prefill rows in one call, so that threads need not wait for each other in between."""
        self._attend(params, cache, query, metadata, out, 0, metadata.num_requests)

    def layer_step(
        self, params: AttentionParams, rotary: tuple[torch.Tensor, torch.Tensor] | None, metadata: AttentionMetadata
    ) -> LayerStep:
        """What layers with these params and this rotary embedding share in a step. rotary: cos and sin, each float32
        [T, 1, rotary_dim / 2]."""
        batch = _batch(params, metadata, 0, metadata.num_requests)
        return LayerStep(batch, metadata.slot_mapping, *(rotary or (None, None)))

    def write_keys_values(
        self,
        params: AttentionParams,
        cache: LayerCache,
        keys_values: torch.Tensor,
        transform: HeadTransform,
        metadata: AttentionMetadata,
    ) -> None:
        """Write K and V, and attend with nothing. keys_values: [T, num_kv_heads * (k_dim + v_dim)]."""
        self._transform(0, _pages(cache), keys_values, transform, metadata.slot_mapping)

    def attend_queries(
        self,
        params: AttentionParams,
        cache: LayerCache,
        queries: torch.Tensor,
        transform: HeadTransform,
        metadata: AttentionMetadata,
        query_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries [T, num_heads * k_dim] -> [T, num_heads, v_dim] and write nothing: K and V are in their
        pages. query_scale: [T, 1, 1], what queries are multiplied by after all else."""
        pages = _pages(cache)
        no_keys = Pages(
            pages.keys, pages.values, pages.unit_floats, pages.page_tokens, 0, pages.k_dim, pages.v_dim, pages.num_ids
        )
        query = self._transform(params.num_heads, no_keys, queries, transform, metadata.slot_mapping)
        if query_scale is not None:
            query = query * query_scale
        out = query.new_empty(len(query), params.num_heads, params.spec.v_dim)
        self.attend_all(params, cache, query, metadata, out)
        return out

    def _transform(
        self, num_heads: int, pages: Pages, columns: torch.Tensor, transform: HeadTransform, slots: torch.Tensor
    ) -> torch.Tensor:
        return self.kernels.qk_norm_rope_write(
            pages,
            columns,
            num_heads=num_heads,
            cos=transform.cos,
            sin=transform.sin,
            slots=slots,
            query_weight=transform.query_norm,
            key_weight=transform.key_norm,
            eps=transform.eps,
        )

    def _attend(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        start: int,
        stop: int,
    ) -> None:
        batch = _batch(params, metadata, start, stop)
        self.kernels.attend(_pages(cache), batch, query.contiguous(), out, **_visibility(params)._asdict())


def paged_layer(params: AttentionParams, cache: LayerCache, weights: DecoderWeights) -> PagedLayer:
    """A layer's weights with its attention and pages, for `native.decoder.run_layers`."""
    return PagedLayer(weights, _pages(cache), params.num_heads, _visibility(params))


def _batch(params: AttentionParams, metadata: AttentionMetadata, start: int, stop: int) -> Batch:
    """Requests [start, stop), tiled for a layer with these params. The memo keeps the arrays that the batch points
    to."""
    key, batches = (params.spec, params.num_heads, start, stop), metadata.memo.native_batches
    held = batches.get(key)
    if held is None:
        held = batches[key] = make_batch(params.spec, params.num_heads, metadata, start, stop)
    return held.batch


def _visibility(params: AttentionParams) -> Visibility:
    spec = params.spec
    return Visibility(
        window_tokens=spec.window_tokens if isinstance(spec, SlidingWindowSpec) else 0,
        chunk_tokens=spec.attention_chunk_tokens if isinstance(spec, ChunkedLocalAttentionSpec) else 0,
        scale=params.scale,
        softcap=params.softcap or 0.0,
        sinks=params.sinks,
    )


def _pages(cache: LayerCache) -> Pages:
    assert isinstance(cache, NativeLayerCache), "a layer cache of another backend"
    return cache.pages


def make_batch(spec: KVCacheSpec, num_heads: int, metadata: AttentionMetadata, start: int, stop: int) -> HeldBatch:
    """Tiles of requests [start, stop). Those that cost most come first, so that no thread begins a long one at the end.

    Raises InvariantError where a block table lacks a page that a query sees.
    """
    query_start = np.ascontiguousarray(metadata.query_start_host, dtype=np.int64)
    seq_lens = np.ascontiguousarray(metadata.seq_lens_host, dtype=np.int64)
    first_keys = np.ascontiguousarray(metadata.first_keys_host, dtype=np.int64)
    first_blocks = np.ascontiguousarray(metadata.first_blocks_host, dtype=np.int64)
    block_tables = np.ascontiguousarray(metadata.block_tables_host, dtype=np.int64)

    lengths = np.diff(query_start)[start:stop]
    largest = int(lengths.max(initial=1))
    tile_queries = min(max(1, TILE_ROWS // (num_heads // spec.num_kv_heads)), max(1, largest))
    num_tiles = -(-lengths // tile_queries)
    request = np.repeat(np.arange(start, stop), num_tiles)
    first_query = (np.arange(len(request)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_queries
    num_queries = np.minimum(tile_queries, lengths[request - start] - first_query)
    position = seq_lens[request] - lengths[request - start] + first_query
    lowest = np.maximum(spec.first_visible_each(position), first_keys[request])
    _check_tables(metadata, request, lowest, position + num_queries - 1)
    order = np.argsort(-num_queries * (position + num_queries - lowest), kind="stable")
    tiles = np.ascontiguousarray(np.stack([request, first_query], axis=1)[order], dtype=np.int64)
    batch = Batch(
        block_tables.ctypes.data,
        block_tables.shape[1],
        query_start.ctypes.data,
        seq_lens.ctypes.data,
        first_blocks.ctypes.data,
        first_keys.ctypes.data,
        tiles.ctypes.data,
        len(tiles),
        tile_queries,
        int(query_start[start]),
        int(query_start[stop] - query_start[start]),
        int(block_tables.max(initial=-1)) + 1,
    )
    return HeldBatch(batch, (block_tables, query_start, seq_lens, first_blocks, first_keys, tiles))


def _check_tables(metadata: AttentionMetadata, request: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> None:
    """Tile i reads the blocks of positions lowest[i] to highest[i] of request[i]: each must have a page."""
    tables = metadata.block_tables_host
    first = lowest // metadata.page_tokens - metadata.first_blocks_host[request]
    last = highest // metadata.page_tokens - metadata.first_blocks_host[request]
    # nulls[i, c]: how many of row i's first c columns are null
    nulls = np.zeros((tables.shape[0], tables.shape[1] + 1), dtype=np.int64)
    np.cumsum(tables < 0, axis=1, out=nulls[:, 1:])
    outside = (first < 0) | (last >= tables.shape[1])
    columns = nulls.shape[1] - 1
    lacking = outside | (nulls[request, np.minimum(last + 1, columns)] != nulls[request, np.clip(first, 0, columns)])
    if lacking.any():
        at = int(np.flatnonzero(lacking)[0])
        row = int(request[at])
        raise InvariantError(
            f"request {row} sees keys from position {lowest[at]} to {highest[at]}, and its table starts at block "
            f"{metadata.first_blocks_host[row]} and holds {tables[row].tolist()}; a table must cover every block from "
            "the first visible key on"
        )
