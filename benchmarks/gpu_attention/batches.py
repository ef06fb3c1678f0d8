"""Workloads as batches in pages on a device, and what they must move and compute at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention_roofline import WORKLOADS, Workload
from lamella.attention.contract import AttentionParams, LayerCache, token_major_cache
from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec

_SLIDING = SlidingWindowSpec(num_kv_heads=1, k_dim=256, v_dim=256, itemsize_bytes=2, window_tokens=512)
_FULL = FullAttentionSpec(num_kv_heads=1, k_dim=256, v_dim=256, itemsize_bytes=2)
NAMED_WORKLOADS = {
    "gemma-27b-decode-window": WORKLOADS[0],
    "llama-8b-decode-full": WORKLOADS[1],
    "gemma-27b-prefill-window": WORKLOADS[2],
    "llama-8b-prefill-full": WORKLOADS[3],
    "gemma-270m-decode-window": Workload("decode 64 at 2,048, gemma-3-270m window 512", _SLIDING, 4, 64, 2047, 1),
    "gemma-270m-decode-full": Workload("decode 16 at 4,096, gemma-3-270m full", _FULL, 4, 16, 4095, 1),
    "gemma-270m-prefill-window": Workload("prefill 2,048, gemma-3-270m window 512", _SLIDING, 4, 1, 0, 2048),
    "gemma-270m-prefill-full": Workload("prefill 2,048 after 4,096, gemma-3-270m full", _FULL, 4, 1, 4096, 2048),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """A workload's requests in one layer's pages, scattered over an arena; every token is written.

    query [num_requests * num_new, num_heads, k_dim], request by request.
    """

    work: Workload
    params: AttentionParams
    cache: LayerCache
    query: torch.Tensor
    metadata: AttentionMetadata

    @property
    def first_key(self) -> int:
        """The lowest position that some query of a request sees."""
        return self.work.spec.first_visible(self.work.num_prior)

    @property
    def seq_len(self) -> int:
        return self.work.num_prior + self.work.num_new

    def visible_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V from `first_key` on, [num_requests, num_keys, num_kv_heads, dim], contiguous."""
        page_tokens = self.metadata.page_tokens
        positions = torch.arange(self.first_key, self.seq_len, device=self.query.device)
        pages = self.metadata.block_tables[:, positions // page_tokens - self.first_key // page_tokens]
        return self.cache.keys[pages, positions % page_tokens], self.cache.values[pages, positions % page_tokens]

    def visible(self) -> torch.Tensor:
        """Which of `visible_keys` each query of a request sees, bool [num_new, num_keys]."""
        spec = self.work.spec
        device = self.query.device
        queries = np.arange(self.work.num_prior, self.seq_len)
        lowest = torch.from_numpy(spec.first_visible_each(queries)).to(device)[:, None]
        positions = torch.arange(self.first_key, self.seq_len, device=device)
        return (positions >= lowest) & (positions <= torch.from_numpy(queries).to(device)[:, None])


def make_batch(work: Workload, *, page_tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Batch:
    """Random K, V and queries of `dtype`, which must be as wide as work.spec.itemsize_bytes says."""
    spec = work.spec
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    first_block = spec.first_visible(work.num_prior) // page_tokens
    seq_len = work.num_prior + work.num_new
    num_blocks = (seq_len - 1) // page_tokens - first_block + 1
    num_pages = work.num_requests * num_blocks
    block_tables = 1 + rng.permutation(num_pages).reshape(work.num_requests, num_blocks)

    page_bytes = page_tokens * spec.token_bytes
    arena = torch.empty((1 + num_pages) * page_bytes, dtype=torch.uint8, device=device)
    arena.view(dtype).normal_()
    cache = token_major_cache(
        arena, spec=spec, dtype=dtype, page_tokens=page_tokens, unit_bytes=page_bytes, offset_bytes=0
    )
    positions = np.arange(work.num_prior, seq_len)
    slots = block_tables[:, positions // page_tokens - first_block] * page_tokens + positions % page_tokens
    query_start = np.arange(work.num_requests + 1) * work.num_new
    seq_lens = np.full(work.num_requests, seq_len)
    first_blocks = np.full(work.num_requests, first_block)
    first_keys = np.zeros(work.num_requests, dtype=np.int64)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    metadata = AttentionMetadata(
        page_tokens=page_tokens,
        num_decodes=work.num_requests if work.num_new == 1 else 0,
        query_start=on_device(query_start),
        seq_lens=on_device(seq_lens),
        table_rows=on_device(np.arange(work.num_requests)),
        first_blocks=on_device(first_blocks),
        first_keys=on_device(first_keys),
        block_tables=on_device(block_tables),
        slot_mapping=on_device(slots.reshape(-1)),
        query_start_host=query_start,
        seq_lens_host=seq_lens,
        first_blocks_host=first_blocks,
        first_keys_host=first_keys,
        block_tables_host=block_tables,
    )
    return Batch(
        work=work,
        params=AttentionParams(spec=spec, num_heads=work.num_heads, scale=spec.k_dim**-0.5),
        cache=cache,
        query=torch.randn(work.num_requests * work.num_new, work.num_heads, spec.k_dim, device=device).to(dtype),
        metadata=metadata,
    )


def needed_bytes(work: Workload) -> int:
    """K and V that some query sees, once each, the queries and the outputs: what any kernel must move."""
    spec = work.spec
    num_keys = work.num_prior + work.num_new - spec.first_visible(work.num_prior)
    row_bytes = work.num_heads * (spec.k_dim + spec.v_dim) * spec.itemsize_bytes
    return work.num_requests * (num_keys * spec.token_bytes + work.num_new * row_bytes)
