"""Prefill in eager PyTorch: tiles of queries against the band of keys that they see.

A tile of queries [a, b) meets the keys [first_visible(a), b - 1] that exist and no others, so a sliding layer
costs O(window) per token and no mask is larger than tile x band. Inside the band only two corners
need masking: keys after the query on the right, keys that left the window on the left. Everything
in the band is written and visible to some query of the tile.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.attention.metadata import AttentionMetadata, to_device
from lamella.attention.torch_plans import PrefillRequest, QueryTile
from lamella.attention.torch_softmax import attention_weights
from lamella.errors import InvariantError

TILE_QUERIES = 64
MAX_SCORES = 1 << 24  # elements of one tile's score matrix, over all heads


def prefill(
    params: AttentionParams,
    cache: LayerCache,
    query: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
) -> None:
    """See AttentionBackend.prefill."""
    key, plans = (params.spec, params.num_heads), metadata.memo.torch_prefill
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = plan_prefill(params, metadata)
    key_pages = cache.keys.view(cache.keys.shape[0], -1)
    value_pages = cache.values.view(cache.values.shape[0], -1)
    for request in plan:
        spec = params.spec
        keys = key_pages.index_select(0, request.page_ids).float().view(-1, spec.num_kv_heads, spec.k_dim)
        values = value_pages.index_select(0, request.page_ids).float().view(-1, spec.num_kv_heads, spec.v_dim)
        tiles = request.tiles
        first, stop = tiles[0].first_key, tiles[-1].stop_key
        if not math.isfinite(values[first:stop].sum().item()):
            # A NaN that one query sees must not reach the others through 0 * NaN. A tile of one query is safe: it has
            # no masked key.
            num_queries = request.stop - request.start
            tiles = _tiles(
                params, request.first_position, num_queries, request.lowest_key, request.base, 1, {}, values.device
            )
        _attend_tiles(
            params, query[request.start : request.stop], keys, values, tiles, out[request.start : request.stop]
        )


def _attend_tiles(
    params: AttentionParams,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: tuple[QueryTile, ...],
    out: torch.Tensor,
) -> None:
    """One request: query [n, num_heads, k_dim], keys and values [gathered tokens, num_kv_heads, dim]."""
    num_kv_heads = params.spec.num_kv_heads
    group = params.num_heads // num_kv_heads
    num_tokens = query.shape[0]
    scaled = query.float() * params.scale
    # The heads that share a KV head are rows of one product: [num_kv_heads, n * group, k_dim].
    scaled = scaled.view(num_tokens, num_kv_heads, group, -1).transpose(0, 1).reshape(num_kv_heads, -1, query.shape[-1])
    sinks = None if params.sinks is None else params.sinks.view(num_kv_heads, 1, group)
    for tile in tiles:
        num_queries = tile.stop - tile.start
        tile_keys = keys[tile.first_key : tile.stop_key].permute(1, 2, 0)
        tile_values = values[tile.first_key : tile.stop_key].transpose(0, 1)
        scores = torch.bmm(scaled[:, tile.start * group : tile.stop * group], tile_keys)
        if params.softcap is not None:
            scores.div_(params.softcap).tanh_().mul_(params.softcap)
        scores = scores.view(num_kv_heads, num_queries, group, -1)
        if tile.left is not None:
            scores[..., : tile.left.shape[-1]].masked_fill_(tile.left, float("-inf"))
        if tile.right is not None:
            scores[..., -num_queries:].masked_fill_(tile.right, float("-inf"))
        weights, shares = attention_weights(scores, sinks)
        attended = torch.bmm(weights.flatten(1, 2), tile_values).view(num_kv_heads, num_queries, group, -1)
        if shares is not None:
            attended.mul_(shares)
        out[tile.start : tile.stop] = attended.transpose(0, 1).flatten(1, 2)


def plan_prefill(params: AttentionParams, metadata: AttentionMetadata) -> tuple[PrefillRequest, ...]:
    """The pages and tiles of every prefill request. Costs O(new tokens + pages read)."""
    page_tokens = metadata.page_tokens
    device = metadata.block_tables.device
    first_row = int(metadata.query_start_host[metadata.num_decodes])
    shared_masks: dict[int, torch.Tensor] = {}
    plan = []
    for i in range(metadata.num_decodes, metadata.num_requests):
        start, stop = (int(row) - first_row for row in metadata.query_start_host[i : i + 2])
        seq_len = int(metadata.seq_lens_host[i])
        first_position = seq_len - (stop - start)
        lowest_key = int(metadata.first_keys_host[i])
        first_block = max(params.spec.first_visible(first_position), lowest_key) // page_tokens
        first_column = first_block - int(metadata.first_blocks_host[i])
        if first_column < 0:
            raise InvariantError(
                f"prefill request {i} sees keys from block {first_block} on, and its table starts at block "
                f"{metadata.first_blocks_host[i]}; a table must cover every block from the first visible key on"
            )
        columns = slice(first_column, first_column + (seq_len - 1) // page_tokens + 1 - first_block)
        base = first_block * page_tokens
        tile_queries = max(1, min(TILE_QUERIES, MAX_SCORES // (params.num_heads * (seq_len - base))))
        plan.append(
            PrefillRequest(
                start=start,
                stop=stop,
                first_position=first_position,
                lowest_key=lowest_key,
                page_ids=to_device(np.maximum(metadata.block_tables_host[i, columns], 0), device),
                base=base,
                tiles=_tiles(
                    params, first_position, stop - start, lowest_key, base, tile_queries, shared_masks, device
                ),
            )
        )
    return tuple(plan)


def _tiles(
    params: AttentionParams,
    first_position: int,
    num_queries: int,
    lowest_key: int,
    base: int,
    tile_queries: int,
    right_masks: dict[int, torch.Tensor],
    device: torch.device,
) -> tuple[QueryTile, ...]:
    """Tiles over queries [first_position, first_position + num_queries); gathered row 0 is position `base`.

    lowest_key: no query sees a position below it.
    right_masks: one mask per tile height, filled here and shared.
    """
    tiles = []
    for start in range(0, num_queries, tile_queries):
        stop = min(num_queries, start + tile_queries)
        height = stop - start
        # [height], never decreasing
        firsts = params.spec.first_visible_each(np.arange(first_position + start, first_position + stop))
        firsts = np.maximum(firsts, lowest_key)
        first_key = int(firsts[0]) - base
        stop_key = first_position + stop - base
        left = None
        if firsts[-1] > firsts[0]:
            hidden = np.arange(firsts[0], firsts[-1]) < firsts[:, None]
            left = torch.from_numpy(hidden[:, None]).to(device)
        if height > 1 and height not in right_masks:
            square = torch.ones(height, height, dtype=torch.bool, device=device)
            right_masks[height] = square.triu(1).unsqueeze(1)
        tiles.append(
            QueryTile(
                start=start,
                stop=stop,
                first_key=first_key,
                stop_key=stop_key,
                left=left,
                right=right_masks.get(height),
            )
        )
    return tuple(tiles)
