"""A batch as xformers' masks: which queries and keys are a block of the mask, and where the block's keys lie.

A block's queries and keys are aligned at the bottom right: the last query of a request is at the position of its last
key, whatever came before it. So a block of new tokens and of all keys that they see is a causal or a local mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.attention.metadata import AttentionMetadata, to_device
from lamella.attention.packed_keys import PackedKeys
from lamella.errors import InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

UNBOUNDED = 1 << 62
PAGED_TOKENS = 64  # the paged kernel reads so many keys at a time, from one page


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a mask, in the order of the queries. A request is one block, under chunked-local attention one for
    each of its chunks: a chunk's queries see its keys and no others. All int64 [num_blocks]."""

    requests: NDArray[np.int64]
    num_queries: NDArray[np.int64]
    first_keys: NDArray[np.int64]  # lowest position that some query of the block sees
    stop_keys: NDArray[np.int64]  # one behind the last query's position

    @property
    def num_keys(self) -> NDArray[np.int64]:
        return self.stop_keys - self.first_keys


def make_blocks(spec: KVCacheSpec, metadata: AttentionMetadata, requests: range) -> Blocks:
    """Blocks of `requests`. Costs O(blocks)."""
    numbers = np.arange(requests.start, requests.stop)
    stops = metadata.seq_lens_host[numbers]
    starts = stops - np.diff(metadata.query_start_host)[numbers]
    chunk = spec.attention_chunk_tokens if isinstance(spec, ChunkedLocalAttentionSpec) else UNBOUNDED
    first_chunk = starts // chunk
    num_chunks = (stops - 1) // chunk - first_chunk + 1
    rows = np.repeat(np.arange(len(numbers)), num_chunks)
    chunk_start = (first_chunk[rows] + np.arange(len(rows)) - (np.cumsum(num_chunks) - num_chunks)[rows]) * chunk
    starts = np.maximum(starts[rows], chunk_start)
    stops = np.minimum(stops[rows], chunk_start + chunk)
    numbers = numbers[rows]
    first_keys = np.maximum(spec.first_visible_each(starts), metadata.first_keys_host[numbers])
    _check_tables(metadata, numbers, first_keys)
    return Blocks(requests=numbers, num_queries=stops - starts, first_keys=first_keys, stop_keys=stops)


def pack_keys(spec: KVCacheSpec, metadata: AttentionMetadata, requests: range) -> PackedKeys:
    """The mask of `requests`, at least one, and where the keys are that they see. Costs O(keys): for a window,
    O(window + new tokens) per request. Raises InvariantError where a block table starts above what is seen."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    blocks = make_blocks(spec, metadata, requests)
    device = metadata.block_tables.device
    mask = BlockDiagonalMask.from_seqlens(blocks.num_queries.tolist(), blocks.num_keys.tolist(), device=device)
    if isinstance(spec, SlidingWindowSpec) and (blocks.num_keys > spec.window_tokens).any():
        mask = mask.make_local_attention_from_bottomright(spec.window_tokens)
    else:
        mask = mask.make_causal_from_bottomright()

    page_tokens = metadata.page_tokens
    rows = np.repeat(np.arange(len(blocks.requests)), blocks.num_keys)
    starts = np.cumsum(blocks.num_keys) - blocks.num_keys
    positions = np.arange(len(rows)) - starts[rows] + blocks.first_keys[rows]
    owners = blocks.requests[rows]
    columns = positions // page_tokens - metadata.first_blocks_host[owners]
    page_ids = metadata.block_tables_host[owners, columns]
    # Only padded rows see a null page, and nobody reads their results.
    page_ids = np.maximum(page_ids, 0)
    return PackedKeys(mask, to_device(page_ids, device), to_device(positions % page_tokens, device))


def paged_mask(spec: KVCacheSpec, metadata: AttentionMetadata, pages_per_id: int) -> Any | None:
    """The mask of the decode requests over pages as they lie, page id p at `p * pages_per_id`.

    None where xformers would read keys that were never written: those below a request's first key. It masks by
    multiplying with zero, which does not remove a NaN. Raises InvariantError where a block table starts above what is
    seen.
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalGappyKeysMask, PagedBlockDiagonalGappyKeysMask

    num_decodes = metadata.num_decodes
    blocks = make_blocks(spec, metadata, range(num_decodes))
    if (blocks.first_keys // PAGED_TOKENS * PAGED_TOKENS < metadata.first_keys_host[:num_decodes]).any():
        return None
    # Each request has its own range of positions, as long as its row of the table.
    tables, device = metadata.block_tables_host[:num_decodes], metadata.block_tables.device
    range_tokens = tables.shape[1] * metadata.page_tokens
    in_range = blocks.first_keys - metadata.first_blocks_host[:num_decodes] * metadata.page_tokens
    starts = in_range + range_tokens * np.arange(num_decodes)
    mask = BlockDiagonalGappyKeysMask.from_seqlens(
        blocks.num_queries.tolist(),
        [*starts.tolist(), range_tokens * num_decodes],
        blocks.num_keys.tolist(),
        device=device,
    )
    pages = to_device((np.maximum(tables, 0) * pages_per_id).astype(np.int32), device)
    return mask.make_paged(pages, metadata.page_tokens, range_tokens, PagedBlockDiagonalGappyKeysMask)


def _check_tables(metadata: AttentionMetadata, requests: NDArray[np.int64], first_keys: NDArray[np.int64]) -> None:
    late = first_keys // metadata.page_tokens < metadata.first_blocks_host[requests]
    if late.any():
        raise InvariantError(
            f"requests {sorted(set(requests[late].tolist()))} see keys below the first block of their tables; a table "
            "must cover every block from the first visible key on"
        )
