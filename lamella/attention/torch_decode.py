"""Decode in eager PyTorch: batches of equally long windows, gathered in pieces that fit the cache.

A gather of scattered pages is limited by memory only while what it writes stays in the processor's
cache. So requests are sorted by the length of what they see, batches hold no more than
`PIECE_BYTES` of K, and a longer context is walked in pieces of that size. Lengths are rounded up to
`ROUND_TOKENS`, never to the batch's longest: a request's arithmetic has the same shape whoever is
decoded beside it.

The query heads of one KV head are rows of one matrix product, so K and V are never expanded. Two
batched products and a softmax are as fast as torch's fused SDPA here, and can express soft-caps and
sinks.
"""

from __future__ import annotations

import numpy as np
import torch

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.torch_plans import DecodeBatch, DecodePlan, Piece
from lamella.attention.torch_softmax import attention_weights
from lamella.errors import InvariantError
from lamella.kv_cache.spec import KVCacheSpec

PIECE_BYTES = 4 << 20
ROUND_TOKENS = 32


def decode(
    params: AttentionParams,
    cache: LayerCache,
    query: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
) -> None:
    """See AttentionBackend.decode."""
    spec, plans = params.spec, metadata.memo.torch_decode
    plan = plans.get(spec)
    if plan is None:
        plan = plans[spec] = plan_decode(spec, metadata)
    num_rows = query.shape[0]
    group = params.num_heads // spec.num_kv_heads
    ordered = query.index_select(0, plan.order).float() * params.scale
    # [num_kv_heads, num_rows, group, k_dim]
    ordered = ordered.view(num_rows, spec.num_kv_heads, group, spec.k_dim).transpose(0, 1).contiguous()
    sinks = None if params.sinks is None else params.sinks.view(spec.num_kv_heads, 1, group)
    result = ordered.new_empty(spec.num_kv_heads, num_rows, group, spec.v_dim)

    key_pages = cache.keys.view(cache.keys.shape[0], -1)
    value_pages = cache.values.view(cache.values.shape[0], -1)
    widest = max(key_pages.shape[1], value_pages.shape[1])
    buffer = torch.empty(plan.max_pages * widest, dtype=cache.keys.dtype, device=cache.keys.device)
    for batch in plan.batches:
        batch_query = ordered[:, batch.start : batch.stop]
        num_requests = batch.stop - batch.start
        parts = []
        for piece in batch.pieces:
            keys = _gather(key_pages, piece.page_ids, buffer)
            parts.append(_scores(batch_query, keys.view(num_requests, piece.num_tokens, spec.num_kv_heads, spec.k_dim)))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if params.softcap is not None:
            scores.div_(params.softcap).tanh_().mul_(params.softcap)
        scores.masked_fill_(batch.hidden, float("-inf"))
        weights, shares = attention_weights(scores, sinks)

        attended = result[:, batch.start : batch.stop]
        first = 0
        for piece in batch.pieces:
            values = _gather(value_pages, piece.page_ids, buffer)
            rows = values.view(num_requests * piece.num_tokens, -1)
            # A weight of 0 times NaN is NaN, so values that no query sees must be replaced by numbers.
            rows.index_fill_(0, piece.hidden_rows, 0)
            values = rows.view(num_requests, piece.num_tokens, spec.num_kv_heads, spec.v_dim)
            _weigh(weights[..., first : first + piece.num_tokens], values, attended, add=first > 0)
            first += piece.num_tokens
        if shares is not None:
            attended.mul_(shares)
    ordered_out = result.transpose(0, 1).reshape(num_rows, params.num_heads, spec.v_dim)
    out.copy_(ordered_out.index_select(0, plan.rank))


def _gather(pages: torch.Tensor, page_ids: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Rows `page_ids` of `pages` [num_ids, page elements] in float32; the buffer is overwritten."""
    shape = (page_ids.shape[0], pages.shape[1])
    gathered = buffer[: shape[0] * shape[1]].view(shape)
    torch.index_select(pages, 0, page_ids, out=gathered)
    return gathered.float()


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """query [num_kv_heads, B, group, k_dim] . keys [B, n, num_kv_heads, k_dim] -> [num_kv_heads, B, group, n]."""
    num_kv_heads, num_requests, group, _ = query.shape
    if num_requests == 1:
        return torch.bmm(query[:, 0], keys[0].permute(1, 2, 0)).unsqueeze(1)
    scores = query.new_empty(num_kv_heads, num_requests, group, keys.shape[1])
    for head in range(num_kv_heads):
        torch.bmm(query[head], keys[:, :, head].transpose(1, 2), out=scores[head])
    return scores


def _weigh(weights: torch.Tensor, values: torch.Tensor, attended: torch.Tensor, *, add: bool) -> None:
    """attended [num_kv_heads, B, group, v_dim] = (or, to add, +=) weights . values [B, n, num_kv_heads, v_dim]."""
    if weights.shape[1] == 1:
        part = torch.bmm(weights[:, 0], values[0].transpose(0, 1))
        attended[:, 0] = attended[:, 0] + part if add else part
        return
    for head in range(weights.shape[0]):
        head_values = values[:, :, head]
        if add:
            attended[head].baddbmm_(weights[head], head_values)
        else:
            torch.bmm(weights[head], head_values, out=attended[head])


def plan_decode(spec: KVCacheSpec, metadata: AttentionMetadata) -> DecodePlan:
    """Which pages each decode request reads, in which batches. Costs O(pages read)."""
    page_tokens = metadata.page_tokens
    device = metadata.block_tables.device
    num_decodes = metadata.num_decodes
    last = metadata.seq_lens_host[:num_decodes] - 1
    first = np.maximum(spec.first_visible_each(last), metadata.first_keys_host[:num_decodes])
    first_column = first // page_tokens - metadata.first_blocks_host[:num_decodes]
    if (first_column < 0).any():
        raise InvariantError(
            f"decode requests {np.flatnonzero(first_column < 0).tolist()} see keys below the first block of their "
            "tables; a table must cover every block from the first visible key on"
        )
    num_pages = last // page_tokens - first // page_tokens + 1
    round_pages = -(-ROUND_TOKENS // page_tokens)
    padded_pages = -(-num_pages // round_pages) * round_pages
    order = np.argsort(padded_pages, kind="stable")

    widest_token_bytes = spec.num_kv_heads * max(spec.k_dim, spec.v_dim) * 4
    piece_pages = max(1, PIECE_BYTES // (widest_token_bytes * page_tokens))
    batches = []
    max_pages = 0
    start = 0
    while start < num_decodes:
        pages_each = int(padded_pages[order[start]])
        same = int(np.searchsorted(padded_pages[order], pages_each, side="right"))
        stop = min(same, start + max(1, piece_pages // pages_each))
        requests = order[start:stop]

        columns = first_column[requests, None] + np.minimum(np.arange(pages_each), num_pages[requests, None] - 1)
        # Padding repeats the last page. No query sees a null page, so any page may be read in its place.
        page_ids = np.maximum(metadata.block_tables_host[requests[:, None], columns], 0)  # [requests, pages_each]
        offsets = np.arange(pages_each * page_tokens) + first[requests, None] // page_tokens * page_tokens
        hidden = (offsets < first[requests, None]) | (offsets > last[requests, None])  # [requests, tokens]

        pieces = []
        for page in range(0, pages_each, piece_pages):
            piece_ids = page_ids[:, page : page + piece_pages]
            piece_hidden = hidden[:, page * page_tokens : (page + piece_pages) * page_tokens]
            max_pages = max(max_pages, piece_ids.size)
            pieces.append(
                Piece(
                    page_ids=torch.from_numpy(piece_ids.reshape(-1)).to(device),
                    num_tokens=piece_hidden.shape[1],
                    hidden_rows=torch.from_numpy(np.flatnonzero(piece_hidden)).to(device),
                )
            )
        batches.append(
            DecodeBatch(
                start=start, stop=stop, pieces=tuple(pieces), hidden=torch.from_numpy(hidden[:, None]).to(device)
            )
        )
        start = stop
    return DecodePlan(
        order=torch.from_numpy(order).to(device),
        rank=torch.from_numpy(np.argsort(order)).to(device),
        batches=tuple(batches),
        max_pages=max_pages,
    )
