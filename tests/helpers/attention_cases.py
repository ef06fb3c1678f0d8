"""Random ragged attention batches in a paged arena where everything that was never written is NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend, AttentionParams, LayerCache, attend
from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.reference import ReferenceBackend
from lamella.attention.step_memo import StepMemo
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class Ragged:
    """One request: `num_prior` tokens are in the cache, `num_new` are computed now.

    first_key: the lowest position that has KV, num_prior at most. num_cached_new: that
    many of the new tokens, from the first, are given slot -1; the cache holds what they would have stored.
    """

    num_prior: int
    num_new: int = 1
    first_key: int = 0
    num_cached_new: int = 0

    @property
    def seq_len(self) -> int:
        return self.num_prior + self.num_new


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch, its pages and its inputs. `keys[i]`, `values[i]` [seq_len - first_kept, heads, dim] are request i's
    K and V, as the cache stores them (divided by the scales), from position `first_kept[i]`: the first that any query
    sees."""

    params: AttentionParams
    dtype: torch.dtype
    unit_bytes: int
    offset_bytes: int
    arena: torch.Tensor  # prior context written, the rest NaN
    metadata: AttentionMetadata
    query: torch.Tensor  # [T, num_heads, k_dim]
    new_keys: torch.Tensor
    new_values: torch.Tensor
    requests: tuple[Ragged, ...]
    first_kept: tuple[int, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def cache(self, backend: AttentionBackend, arena: torch.Tensor) -> LayerCache:
        return backend.layer_cache(
            arena,
            spec=self.params.spec,
            dtype=self.dtype,
            page_tokens=self.metadata.page_tokens,
            unit_bytes=self.unit_bytes,
            offset_bytes=self.offset_bytes,
        )

    def run(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [T, num_heads, v_dim], the arena after the write); the case is left as it was."""
        arena = self.arena.clone()
        forget_memo(self.metadata)
        cache = self.cache(backend, arena)
        return attend(backend, self.params, cache, self.query, self.new_keys, self.new_values, self.metadata), arena


def forget_memo(metadata: AttentionMetadata) -> None:
    """As if it had just been made."""
    object.__setattr__(metadata, "memo", StepMemo())
    object.__setattr__(metadata, "parts", {})


def memo_entries(metadata: AttentionMetadata) -> dict[tuple[str, Hashable], object]:
    """All that the memo has, by field and key."""
    entries: dict[tuple[str, Hashable], object] = {}
    for one in dataclasses.fields(metadata.memo):
        value = getattr(metadata.memo, one.name)
        if isinstance(value, dict):
            entries |= {(one.name, key): found for key, found in value.items()}
        elif isinstance(value, set):
            entries |= {(one.name, key): True for key in value}
        elif value is not None:
            entries[one.name, None] = value
    return entries


def nan_arena(num_bytes: int) -> torch.Tensor:
    """uint8 of 0xFF, which is NaN in float16, bfloat16, float32 and both kinds of fp8 alike."""
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def make_case(
    spec: KVCacheSpec,
    requests: list[Ragged],
    *,
    num_heads: int,
    page_tokens: int,
    dtype: torch.dtype = torch.float32,
    query_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    scale: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    units_per_page: int = 2,
    num_null_columns: int = 0,
    num_unwritten_tokens: int = 0,
    seed: int = 0,
    panels: bool = False,
) -> AttentionCase:
    """Requests with one new token must come first to be decoded as such; later ones are prefills.

    query_dtype: None is `dtype`, or float32 for fp8. kv_scales: AttentionParams' k_scale and v_scale.
    units_per_page: the group's page is that many units wide, so that ids between two page starts
    overlap pages, as they do where two groups share an arena. num_null_columns: table entries of -1
    below the first kept key (as far as there are blocks). num_unwritten_tokens: that many last rows are
    given slot -1; what they would have stored is in the cache already. panels: pages laid out as the native backend
    has them, else token by token.
    """
    is_fp8 = dtype in FP8_MANTISSA_BITS
    if query_dtype is None:
        query_dtype = torch.float32 if is_fp8 else dtype
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_decodes = 0
    while num_decodes < len(requests) and requests[num_decodes].num_new == 1:
        num_decodes += 1

    # A group's page holds several layers; this layer's part starts at offset_bytes.
    layer_bytes = page_tokens * spec.token_bytes
    unit_bytes = -(-2 * layer_bytes // units_per_page // 64) * 64
    offset_bytes = (unit_bytes * units_per_page - layer_bytes) // 64 * 64
    first_kept = [max(spec.first_visible(request.num_prior), request.first_key) for request in requests]
    first_blocks, tables = [], []
    num_pages = sum(
        (request.seq_len - 1) // page_tokens - kept // page_tokens + 1
        for request, kept in zip(requests, first_kept, strict=True)
    )
    starts = np.cumsum(units_per_page + rng.integers(0, units_per_page, size=num_pages))  # ids, never 0
    arena = nan_arena(int(starts[-1] + units_per_page) * unit_bytes)
    free_ids = list(rng.permutation(starts))
    for request, kept in zip(requests, first_kept, strict=True):
        first_block = kept // page_tokens
        num_null = min(num_null_columns, first_block)
        ids = [free_ids.pop() for _ in range((request.seq_len - 1) // page_tokens - first_block + 1)]
        first_blocks.append(first_block - num_null)
        tables.append([-1] * num_null + ids)
    width = max(len(row) for row in tables)
    block_tables = np.array([row + [-1] * (width - len(row)) for row in tables], dtype=np.int64)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = [
        randn(request.seq_len - kept, spec.num_kv_heads, spec.k_dim).to(dtype)
        for request, kept in zip(requests, first_kept, strict=True)
    ]
    values = [
        randn(request.seq_len - kept, spec.num_kv_heads, spec.v_dim).to(dtype)
        for request, kept in zip(requests, first_kept, strict=True)
    ]
    slots = []
    for i, request in enumerate(requests):
        positions = np.arange(request.num_prior, request.seq_len)
        pages = block_tables[i, positions // page_tokens - first_blocks[i]]
        slots.append(pages * page_tokens + positions % page_tokens)
    slot_mapping = np.concatenate(slots)

    # Written by plain byte offsets: independent of any backend's views.
    def store(page_id: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        page = page_id * unit_bytes + offset_bytes
        if panels:
            floats = arena[page : page + layer_bytes].view(torch.float32)
            floats[panel_indices(spec, page_tokens, offset, of_values=False)] = key
            floats[panel_indices(spec, page_tokens, offset, of_values=True)] = value
            return
        for tensor, begin in ((key, 0), (value, page_tokens * key.numel() * key.element_size())):
            data = tensor.contiguous().flatten().view(torch.uint8)
            at = page + begin + offset * data.numel()
            arena[at : at + data.numel()] = data

    num_tokens = sum(request.num_new for request in requests)
    is_written = np.arange(num_tokens) < num_tokens - num_unwritten_tokens
    token = 0
    for request in requests:
        is_written[token : token + request.num_cached_new] = False
        token += request.num_new
    token = 0
    for i, request in enumerate(requests):
        for position in range(first_kept[i], request.seq_len):
            if position >= request.num_prior:
                token += 1
                if is_written[token - 1]:
                    continue
            page_id = int(block_tables[i, position // page_tokens - first_blocks[i]])
            row = position - first_kept[i]
            store(page_id, position % page_tokens, keys[i][row], values[i][row])
    slot_mapping[~is_written] = -1

    def new_rows(stored: list[torch.Tensor], kv_scale: float) -> torch.Tensor:
        """What is computed for the new tokens: dividing by the scale gives what is stored."""
        rows = torch.cat([x[-request.num_new :].float() for x, request in zip(stored, requests, strict=True)])
        return (rows * kv_scale).to(query_dtype if is_fp8 else dtype)

    query_start = np.concatenate([[0], np.cumsum([request.num_new for request in requests])]).astype(np.int64)
    metadata = make_metadata(
        page_tokens=page_tokens,
        num_decodes=num_decodes,
        query_start=query_start,
        seq_lens=np.array([request.seq_len for request in requests], dtype=np.int64),
        first_blocks=np.array(first_blocks, dtype=np.int64),
        first_keys=np.array([request.first_key for request in requests], dtype=np.int64),
        block_tables=block_tables,
        slot_mapping=slot_mapping,
    )
    return AttentionCase(
        params=AttentionParams(
            spec=spec,
            num_heads=num_heads,
            scale=spec.k_dim**-0.5 if scale is None else scale,
            softcap=softcap,
            sinks=randn(num_heads) if with_sinks else None,
            k_scale=kv_scales[0],
            v_scale=kv_scales[1],
        ),
        dtype=dtype,
        unit_bytes=unit_bytes,
        offset_bytes=offset_bytes,
        arena=arena,
        metadata=metadata,
        query=randn(num_tokens, num_heads, spec.k_dim).to(query_dtype),
        new_keys=new_rows(keys, kv_scales[0]),
        new_values=new_rows(values, kv_scales[1]),
        requests=tuple(requests),
        first_kept=tuple(first_kept),
        keys=tuple(keys),
        values=tuple(values),
    )


@functools.lru_cache(maxsize=1024)
def panel_indices(spec: KVCacheSpec, page_tokens: int, offset: int, *, of_values: bool) -> torch.Tensor:
    """Where in a page of panels token `offset` has its K (or V): int64 [num_kv_heads, dim], in elements.

    A page holds K, then V. In each, every head has its 16-token pieces one after the other. A piece of K is
    [k_dim][16 tokens], a piece of V [v_dim / 16][16 tokens][16 columns].
    """
    piece, row = divmod(offset, 16)
    head = torch.arange(spec.num_kv_heads)[:, None]
    if not of_values:
        dim = torch.arange(spec.k_dim)[None, :]
        return head * page_tokens * spec.k_dim + piece * 16 * spec.k_dim + dim * 16 + row
    dim = torch.arange(spec.v_dim)[None, :]
    start = page_tokens * spec.num_kv_heads * spec.k_dim
    return start + head * page_tokens * spec.v_dim + piece * 16 * spec.v_dim + dim // 16 * 256 + row * 16 + dim % 16


def make_metadata(
    *,
    page_tokens: int,
    num_decodes: int,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    first_blocks: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: np.ndarray,
    first_keys: np.ndarray | None = None,
) -> AttentionMetadata:
    """first_keys None: all 0."""
    if first_keys is None:
        first_keys = np.zeros_like(seq_lens)
    return AttentionMetadata(
        page_tokens=page_tokens,
        num_decodes=num_decodes,
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(seq_lens),
        table_rows=torch.arange(len(seq_lens)),
        first_blocks=torch.from_numpy(first_blocks),
        first_keys=torch.from_numpy(first_keys),
        block_tables=torch.from_numpy(block_tables),
        slot_mapping=torch.from_numpy(slot_mapping),
        query_start_host=query_start,
        seq_lens_host=seq_lens,
        first_blocks_host=first_blocks,
        first_keys_host=first_keys,
        block_tables_host=block_tables,
    )


def write_earlier_tokens(case: AttentionCase) -> None:
    """A page is written from its beginning: what left the window is still there, below what is seen."""
    cache = case.cache(ReferenceBackend(), case.arena)
    for i, kept in enumerate(case.first_kept):
        block, offset = divmod(kept, case.metadata.page_tokens)
        page = int(case.metadata.block_tables_host[i, block - case.metadata.first_blocks_host[i]])
        cache.keys[page, :offset] = 9.0
        cache.values[page, :offset] = 100.0
