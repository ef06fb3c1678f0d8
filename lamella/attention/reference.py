"""The oracle: attention as the visibility rules say it, in float64, one query at a time."""

from __future__ import annotations

import torch

from lamella.attention.contract import AttentionParams, LayerCache, token_major_cache
from lamella.attention.kv_dtype import to_kv_dtype
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.write_arguments import check_write
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


def visible_mask(spec: KVCacheSpec, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Which keys each query sees, bool [num_queries, num_keys], from the rules themselves.

    Deliberately does not call `spec.first_visible`, so that the two can be held against each other.
    Raises ConfigError for a spec whose rule is not known here.
    """
    query = query_positions[:, None]
    key = key_positions[None, :]
    causal = key <= query
    if isinstance(spec, FullAttentionSpec):
        return causal
    if isinstance(spec, SlidingWindowSpec):
        return causal & (query - key < spec.window_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_tokens
        return causal & (key // chunk == query // chunk)
    raise ConfigError(
        f"spec {type(spec).__name__} has no visibility rule in the reference backend; use FullAttentionSpec, "
        "SlidingWindowSpec or ChunkedLocalAttentionSpec"
    )


class ReferenceBackend:
    """Clear, not fast. Keys that a query does not see are not selected, so nothing is ever multiplied with them.

    `decode` and `prefill` raise InvariantError where the block table lacks a page that a query sees.
    """

    name = "reference"

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
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                page_id, offset = divmod(slot, metadata.page_tokens)
                cache.keys[page_id, offset] = to_kv_dtype(key[token], cache.keys.dtype)
                cache.values[page_id, offset] = to_kv_dtype(value[token], cache.values.dtype)

    def decode(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        self._attend_requests(params, cache, query, metadata, out, range(metadata.num_decodes))

    def prefill(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        requests = range(metadata.num_decodes, metadata.num_requests)
        self._attend_requests(params, cache, query, metadata, out, requests)

    def _attend_requests(
        self,
        params: AttentionParams,
        cache: LayerCache,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        requests: range,
    ) -> None:
        """query and out hold the rows of `requests` only."""
        page_tokens = metadata.page_tokens
        first_row = int(metadata.query_start[requests.start])
        for request in requests:
            start = int(metadata.query_start[request]) - first_row
            stop = int(metadata.query_start[request + 1]) - first_row
            seq_len = int(metadata.seq_lens[request])
            query_positions = torch.arange(seq_len - (stop - start), seq_len)

            pages = torch.from_numpy(metadata.block_tables_host[request])
            base = int(metadata.first_blocks_host[request]) * page_tokens
            key_positions = torch.arange(base, base + len(pages) * page_tokens)
            first_key = int(metadata.first_keys[request])
            mask = visible_mask(params.spec, query_positions, key_positions) & (key_positions >= first_key)
            mask &= (pages >= 0).repeat_interleave(page_tokens)
            every_key = visible_mask(params.spec, query_positions, torch.arange(seq_len))[:, first_key:]
            if not torch.equal(mask.sum(1), every_key.sum(1)):
                raise InvariantError(
                    f"request {request}: its block table starts at position {base} and holds {pages.tolist()}, which "
                    f"lacks keys that positions {seq_len - (stop - start)}..{seq_len - 1} see; the table must cover "
                    "every block from the first visible key on"
                )
            keys = cache.keys[pages.clamp(min=0)].flatten(0, 1)  # [covered tokens, num_kv_heads, k_dim]
            values = cache.values[pages.clamp(min=0)].flatten(0, 1)
            for j, row in enumerate(range(start, stop)):
                seen = mask[j].nonzero()[:, 0].to(keys.device)
                out[row] = _attend_one(params, query[row], keys[seen], values[seen]).to(out.dtype)


def _attend_one(params: AttentionParams, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [num_heads, k_dim] over all of keys [n, num_kv_heads, k_dim] -> float64 [num_heads, v_dim]."""
    num_kv_heads = keys.shape[1]
    grouped = query.double().view(num_kv_heads, -1, query.shape[-1])  # [num_kv_heads, heads per kv head, k_dim]
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys.double() * params.k_scale) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    largest = scores.amax(-1, keepdim=True)
    sinks = None
    if params.sinks is not None:
        sinks = params.sinks.double().view(num_kv_heads, -1, 1)
        largest = torch.maximum(largest, sinks)
    weights = torch.exp(scores - largest)
    denominator = weights.sum(-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - largest)
    return torch.einsum("hgn,nhd->hgd", weights / denominator, values.double() * params.v_scale).flatten(0, 1)
