"""Banded prefill over pages: ragged chunks of queries over prior context and new tokens alike.

A program takes the query heads of one KV head for a few neighbouring queries and walks the keys from the first that
the first query sees to the last query. Tiles of keys outside the window or above the diagonal are never visited, so a
windowed layer costs O(window) per token. Tiles that every query of the program sees need no mask; only those at the
two edges have one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.triton.device_functions import (
    FULL,
    LOG2_E,
    first_visible,
    load_pages,
    load_rows,
    scaled_scores,
    widened,
)
from lamella.attention.triton.shapes import LayerShape, page_view
from lamella.attention.triton.tuning import Tile

BATCH_DEPENDENT = ("table_stride", "table_width", "first_request", "num_requests")
BATCH_DEPENDENT_POINTERS = (
    "query", "out", "block_tables", "table_rows", "first_blocks", "query_start", "seq_lens", "first_keys",
)  # fmt: skip


@triton.jit
def find_request(tile, query_start, first_request, num_requests, BLOCK_QUERIES: tl.constexpr):
    """(request whose queries tile number `tile` holds, which tile of the request it is).

    Request i (counted from first_request) begins at tile start_i // BLOCK_QUERIES + i, where start_i is its first row.
    So no two requests share a tile, and each has enough tiles; its last may have no queries. The size of the grid
    follows from the number of tokens and requests alone.
    """
    first_row = tl.load(query_start + first_request)
    low = tile * 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(query_start + first_request + middle) - first_row) // BLOCK_QUERIES + middle
        below = begin <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    begin = (tl.load(query_start + first_request + low) - first_row) // BLOCK_QUERIES + low
    return first_request + low, (tile - begin).to(tl.int32)


@triton.jit
def attend_keys(
    largest,
    total,
    sums,
    q,
    query_positions,
    begin,
    pause,
    resume,
    end,
    first_key,
    end_key,
    keys,
    values,
    table,
    table_width,
    wrap_block,
    key_page_stride,
    value_page_stride,
    scale,
    softcap,
    reach,
    EDGE: tl.constexpr,
    RULE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    """The online softmax over tiles [begin, pause) and [resume, end) of keys. With EDGE both ranges are at an edge of
    the band; without, every query sees all of both. One loop for two edges halves the code.

    At an edge, keys below first_key or from end_key on are not read, for they may not exist. Every other key is seen by
    some query. One whose value is not finite gets NaN for a score and zeros for a value. So it reaches the queries that
    see it and, unlike 0 * NaN, no others.
    """
    skipped = resume - pause
    for number in range(begin, end - skipped):
        tile = tl.where(number < pause, number, number + skipped)
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_band = (positions >= first_key) & (positions < end_key) if EDGE else positions >= 0
        columns = positions // PAGE_TOKENS
        if RULE != FULL:
            columns = tl.where(columns >= wrap_block, columns - table_width, columns)
        pages, present = load_pages(table, columns, in_band)
        tokens = positions % PAGE_TOKENS
        key_rows = keys + pages * key_page_stride + tokens * (NUM_KV_HEADS * K_DIM)
        value_rows = values + pages * value_page_stride + tokens * (NUM_KV_HEADS * V_DIM)
        k = widened(load_rows(key_rows, present, K_DIM, K_PADDED), q.dtype, FP8_MANTISSA)
        v = widened(load_rows(value_rows, present, V_DIM, V_PADDED), q.dtype, FP8_MANTISSA)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = scaled_scores(products, scale, softcap, HAS_SOFTCAP)
        if EDGE:
            finite = tl.abs(v.to(tl.float32)) < float("inf")
            v = tl.where(finite, v, 0.0).to(v.dtype)
            is_bad = tl.max(tl.where(finite, 0, 1), 1) > 0
            scores = tl.where(is_bad[None, :], float("nan"), scores)
            lowest = first_visible(query_positions, reach, RULE)
            visible = (positions[None, :] <= query_positions[:, None]) & (positions[None, :] >= lowest[:, None])
            scores = tl.where(visible & present[None, :], scores, float("-inf"))
        else:
            scores = tl.where(present[None, :], scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Where a query has seen nothing yet its largest score is -inf, and -inf - -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, sums


@triton.jit(do_not_specialize=BATCH_DEPENDENT, do_not_specialize_on_alignment=BATCH_DEPENDENT_POINTERS)
def prefill_kernel(
    query,
    keys,
    values,
    out,
    sinks,
    block_tables,
    table_rows,
    first_blocks,
    query_start,
    seq_lens,
    first_keys,
    scale,
    softcap,
    v_scale,
    reach,
    query_row_stride,
    query_head_stride,
    out_row_stride,
    key_page_stride,
    value_page_stride,
    table_stride,
    table_width,
    first_request,
    num_requests,
    RULE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    """Program (tile of queries, block of query heads of one KV head). Rows of `query` and `out` start at the first
    token of `first_request`."""
    # The last queries of a long request see the most keys, so they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    block_queries: tl.constexpr = BLOCK_M // GROUP_BLOCK
    request, request_tile = find_request(tile, query_start, first_request, num_requests, block_queries)
    row_begin = tl.load(query_start + request)
    num_queries = (tl.load(query_start + request + 1) - row_begin).to(tl.int32)
    tile_begin = request_tile * block_queries
    if tile_begin >= num_queries:
        return

    blocks_per_kv_head: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    kv_head = tl.program_id(1) // blocks_per_kv_head
    row = tl.arange(0, BLOCK_M)
    query_index = tile_begin + row // GROUP_BLOCK
    in_group = tl.program_id(1) % blocks_per_kv_head * GROUP_BLOCK + row % GROUP_BLOCK
    is_row = (row < block_queries * GROUP_BLOCK) & (query_index < num_queries) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    rows = row_begin - tl.load(query_start + first_request) + query_index  # of query and out

    seq_len = tl.load(seq_lens + request).to(tl.int32)
    query_positions = seq_len - num_queries + query_index
    first_position = seq_len - num_queries + tile_begin
    last_position = tl.minimum(first_position + block_queries, seq_len) - 1
    first_key = tl.load(first_keys + request).to(tl.int32)
    first_key = tl.maximum(first_visible(first_position, reach, RULE), first_key)

    # Tiles [begin, inner_begin) have keys that left some query's window, [inner_end, end) keys that come after some
    # query; those in between are seen by all.
    begin = first_key // BLOCK_N
    end = last_position // BLOCK_N + 1
    inner_begin = tl.cdiv(tl.maximum(first_visible(last_position, reach, RULE), first_key), BLOCK_N)
    inner_begin = tl.minimum(inner_begin, end)
    inner_end = tl.maximum((first_position + 1) // BLOCK_N, inner_begin)

    q = load_rows(query + rows * query_row_stride + heads * query_head_stride, is_row, K_DIM, K_PADDED)
    if IN_FLOAT32:
        q = q.to(tl.float32)
    # A windowed group's line wraps around: from wrap_block on, entries are table_width further left.
    table = block_tables + tl.load(table_rows + request) * table_stride
    first_block = tl.load(first_blocks + request).to(tl.int32)
    wrap_block = first_block
    if RULE != FULL:
        seen_block = first_key // PAGE_TOKENS
        first_block += (seen_block - first_block) // table_width * table_width
        wrap_block = first_block + table_width
    table -= first_block
    keys += kv_head * K_DIM
    values += kv_head * V_DIM

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    sums = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    largest, total, sums = attend_keys(
        largest,
        total,
        sums,
        q,
        query_positions,
        begin,
        inner_begin,
        inner_end,
        end,
        first_key,
        last_position + 1,
        keys,
        values,
        table,
        table_width,
        wrap_block,
        key_page_stride,
        value_page_stride,
        scale,
        softcap,
        reach,
        True,
        RULE,
        HAS_SOFTCAP,
        NUM_KV_HEADS,
        K_DIM,
        K_PADDED,
        V_DIM,
        V_PADDED,
        PAGE_TOKENS,
        BLOCK_N,
        FP8_MANTISSA,
    )
    largest, total, sums = attend_keys(
        largest,
        total,
        sums,
        q,
        query_positions,
        inner_begin,
        inner_end,
        inner_end,
        inner_end,
        first_key,
        last_position + 1,
        keys,
        values,
        table,
        table_width,
        wrap_block,
        key_page_stride,
        value_page_stride,
        scale,
        softcap,
        reach,
        False,
        RULE,
        HAS_SOFTCAP,
        NUM_KV_HEADS,
        K_DIM,
        K_PADDED,
        V_DIM,
        V_PADDED,
        PAGE_TOKENS,
        BLOCK_N,
        FP8_MANTISSA,
    )
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    columns = tl.arange(0, V_PADDED)
    target = out + rows[:, None] * out_row_stride + heads[:, None] * V_DIM + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < V_DIM)[None, :])


def prefill(
    params: AttentionParams,
    cache: LayerCache,
    query: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    *,
    tile: Tile,
    first_request: int,
) -> None:
    """See AttentionBackend.prefill; query and out hold the rows of the requests from `first_request` on. This is at
    most metadata.num_decodes; where it is less, decode rows are among them."""
    shape = LayerShape.of(params, cache, query.dtype)
    constants = prefill_constants(
        shape,
        tile,
        has_softcap=params.softcap is not None,
        has_sinks=params.sinks is not None,
    )
    num_requests = metadata.num_requests - first_request
    block_queries = constants["BLOCK_M"] // constants["GROUP_BLOCK"]
    num_tiles = query.shape[0] // block_queries + num_requests
    head_programs = shape.num_kv_heads * triton.cdiv(shape.group, constants["GROUP_BLOCK"])
    prefill_kernel[(num_tiles, head_programs)](
        query,
        page_view(cache.keys, shape.fp8_mantissa),
        page_view(cache.values, shape.fp8_mantissa),
        out,
        params.sinks,
        metadata.block_tables,
        metadata.table_rows,
        metadata.first_blocks,
        metadata.query_start,
        metadata.seq_lens,
        metadata.first_keys,
        params.scale * params.k_scale,
        params.softcap or 0.0,
        params.v_scale,
        shape.reach,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        cache.keys.stride(0),
        cache.values.stride(0),
        metadata.block_tables.stride(0),
        metadata.block_tables.shape[1],
        first_request,
        num_requests,
        **constants,
        **tile.launch_options,
    )


def prefill_constants(shape: LayerShape, tile: Tile, *, has_softcap: bool, has_sinks: bool) -> dict[str, int]:
    """Compile-time constants of `prefill_kernel`."""
    return shape.constants | {
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "GROUP_BLOCK": min(shape.group, tile.block_m),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
