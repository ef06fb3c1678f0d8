"""Split-KV decode over pages.

The context is cut into segments at absolute positions, each with its own online softmax. A program takes a run of
whole segments, as many as keep the device busy, and stores one partial result per segment; a second kernel merges them
in order. How long a segment is depends on how much the request sees, so that partial results take bounded memory, and
on nothing else. How segments are dealt to programs changes who computes a partial result, never what it is: a request's
output is the same, bit for bit, whatever is decoded beside it. For the same reason no compile-time constant below
depends on the batch, and what differs from batch to batch is never specialised on.

The query heads of one KV head are the rows of one matrix product, padded to the 16 that tensor cores ask for.
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
    load_pages,
    load_rows,
    scaled_scores,
    widened,
)
from lamella.attention.triton.shapes import LayerShape, page_view
from lamella.attention.triton.tuning import Tile
from lamella.attention.triton.window_indices import WindowIndices

MERGED_SEGMENTS = 16  # how many segments are merged at a time
MERGE_TILE = Tile(block_m=1, block_n=MERGED_SEGMENTS, num_warps=4, num_stages=2)
BATCH_DEPENDENT = ("table_stride", "scratch_segments", "segments_per_program")
BATCH_DEPENDENT_POINTERS = ("query", "out", "tables", "table_places", "first_blocks", "seq_lens", "first_keys")


@triton.jit
def visible_segments(seq_len, first_key, reach, RULE: tl.constexpr, SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """(tokens per segment, the segment of the first key that the last token sees, how many from there on hold keys)."""
    span = seq_len
    if RULE != FULL:
        span = tl.minimum(seq_len, reach)
    segment = span * 0 + SEGMENT
    while segment * MAX_SEGMENTS < span:
        segment *= 2
    first_segment = first_key // segment
    return segment, first_segment, tl.cdiv(seq_len, segment) - first_segment


@triton.jit(do_not_specialize=BATCH_DEPENDENT, do_not_specialize_on_alignment=BATCH_DEPENDENT_POINTERS)
def decode_kernel(
    query,
    keys,
    values,
    partial_sums,
    partial_stats,
    tables,
    table_places,
    first_blocks,
    seq_lens,
    first_keys,
    scale,
    softcap,
    reach,
    query_row_stride,
    query_head_stride,
    key_page_stride,
    value_page_stride,
    table_stride,
    scratch_segments,
    segments_per_program,
    RULE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
):
    """Program (request, block of query heads of one KV head, run of segments).

    first_keys: the first key that each request sees. In full attention, `tables` are the block tables and table_places
    their rows; with a window, the `WindowIndices`: indices and indptr, and first_blocks is not read.
    partial_sums [R, scratch_segments, heads, V_DIM] gets the sums of exp2(score - largest) * value, partial_stats
    [R, scratch_segments, heads, 2] the largest score and the sum of exp2, of the request's segments from the first on.
    """
    request = tl.program_id(0).to(tl.int64)
    blocks_per_kv_head: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    kv_head = tl.program_id(1) // blocks_per_kv_head
    in_group = tl.program_id(1) % blocks_per_kv_head * GROUP_BLOCK + tl.arange(0, BLOCK_M)
    is_head = (tl.arange(0, BLOCK_M) < GROUP_BLOCK) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group

    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = tl.load(first_keys + request).to(tl.int32)
    segment, first_segment, num_segments = visible_segments(seq_len, first, reach, RULE, SEGMENT, MAX_SEGMENTS)
    run_begin = tl.program_id(2) * segments_per_program
    run_end = tl.minimum(run_begin + segments_per_program, num_segments)
    if (run_begin >= run_end) | (seq_len <= 0):
        return
    begin_tile = tl.maximum(first, (first_segment + run_begin) * segment) // BLOCK_N
    end_tile = tl.cdiv(tl.minimum(seq_len, (first_segment + run_end) * segment), BLOCK_N)
    segment_tiles = segment // BLOCK_N

    q = load_rows(query + request * query_row_stride + heads * query_head_stride, is_head, K_DIM, K_PADDED)
    if IN_FLOAT32:
        q = q.to(tl.float32)
    if RULE == FULL:
        table = tables + tl.load(table_places + request) * table_stride - tl.load(first_blocks + request)
    else:
        table = tables + tl.load(table_places + request) - first // PAGE_TOKENS
    keys += kv_head * K_DIM
    values += kv_head * V_DIM

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    for tile in range(begin_tile, end_tile):
        # A new segment starts: with -inf as the largest score so far, what has been summed before is multiplied by 0.
        largest = tl.where(tile % segment_tiles == 0, float("-inf"), largest)
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_window = (positions >= first) & (positions < seq_len)
        pages, present = load_pages(table, positions // PAGE_TOKENS, in_window)
        tokens = positions % PAGE_TOKENS
        key_rows = keys + pages * key_page_stride + tokens * (NUM_KV_HEADS * K_DIM)
        value_rows = values + pages * value_page_stride + tokens * (NUM_KV_HEADS * V_DIM)
        k = widened(load_rows(key_rows, present, K_DIM, K_PADDED), q.dtype, FP8_MANTISSA)
        v = widened(load_rows(value_rows, present, V_DIM, V_PADDED), q.dtype, FP8_MANTISSA)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = scaled_scores(products, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(present[None, :], scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Where nothing has been seen yet the largest score is -inf, and -inf - -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

        if ((tile + 1) % segment_tiles == 0) | (tile + 1 == end_tile):
            number = tile // segment_tiles - first_segment
            rows = (request * scratch_segments + number) * (NUM_KV_HEADS * GROUP) + heads
            columns = tl.arange(0, V_PADDED)
            tl.store(
                partial_sums + rows[:, None] * V_DIM + columns[None, :],
                sums,
                mask=is_head[:, None] & (columns < V_DIM)[None, :],
            )
            tl.store(partial_stats + rows * 2, largest, mask=is_head)
            tl.store(partial_stats + rows * 2 + 1, total, mask=is_head)


@triton.jit(do_not_specialize=("scratch_segments",), do_not_specialize_on_alignment=BATCH_DEPENDENT_POINTERS)
def merge_kernel(
    partial_sums,
    partial_stats,
    sinks,
    out,
    seq_lens,
    first_keys,
    v_scale,
    reach,
    out_row_stride,
    scratch_segments,
    RULE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (request, head): its segments in order, BLOCK_S at a time. The sink joins here, once."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first_key = tl.load(first_keys + request).to(tl.int32)
    _, _, num_segments = visible_segments(seq_len, first_key, reach, RULE, SEGMENT, MAX_SEGMENTS)
    if seq_len <= 0:
        num_segments = 0

    columns = tl.arange(0, V_PADDED)
    largest = float("-inf")
    total = 0.0
    if HAS_SINKS:
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    sums = tl.zeros([V_PADDED], tl.float32)
    for begin in range(0, num_segments, BLOCK_S):
        segments = begin + tl.arange(0, BLOCK_S)
        present = segments < num_segments
        rows = (request * scratch_segments + segments) * NUM_HEADS + head
        segment_largest = tl.load(partial_stats + rows * 2, mask=present, other=float("-inf"))
        segment_total = tl.load(partial_stats + rows * 2 + 1, mask=present, other=0.0)
        segment_sums = tl.load(
            partial_sums + rows[:, None] * V_DIM + columns[None, :],
            mask=present[:, None] & (columns < V_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(segment_largest, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(segment_largest - base)
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights * segment_total, 0)
        sums = sums * decay + tl.sum(weights[:, None] * segment_sums, 0)
        largest = new_largest
    result = sums / tl.where(total == 0.0, 1.0, total) * v_scale
    target = out + request * out_row_stride + head * V_DIM + columns
    tl.store(target, result.to(out.dtype.element_ty), mask=columns < V_DIM)


def decode(
    params: AttentionParams,
    cache: LayerCache,
    query: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    *,
    tile: Tile,
    segment_tokens: int,
    max_segments: int,
    target_programs: int,
    windows: WindowIndices | None,
) -> None:
    """See AttentionBackend.decode. windows: where the keys are that a windowed layer sees; None: the layer has full
    attention and reads the block tables. `segment_tokens` is a multiple of `tile.block_n`; the grid is filled up to
    about `target_programs` programs. Everything here is known on the host: nothing waits for the device. What is
    launched follows from the number of requests and the width of their tables on the host, not from how long they
    are."""
    shape = LayerShape.of(params, cache, query.dtype)
    num_requests = query.shape[0]
    segments = {"segment_tokens": segment_tokens, "max_segments": max_segments}
    max_tokens = metadata.block_tables_host.shape[1] * metadata.page_tokens
    scratch_segments = count_scratch_segments(max_tokens, params.spec.reach_tokens, **segments)
    constants = decode_constants(shape, tile, **segments, has_softcap=params.softcap is not None)
    head_programs = shape.num_kv_heads * triton.cdiv(shape.group, constants["GROUP_BLOCK"])
    num_runs = min(scratch_segments, max(1, target_programs // (num_requests * head_programs)))
    segments_per_program = triton.cdiv(scratch_segments, num_runs)
    num_runs = triton.cdiv(scratch_segments, segments_per_program)

    if windows is None:
        tables, table_places, first_keys = metadata.block_tables, metadata.table_rows, metadata.first_keys
    else:
        tables, table_places, first_keys = windows.indices, windows.indptr, windows.first_keys
    shape_out = (num_requests, scratch_segments, params.num_heads)
    partial_sums = torch.empty(*shape_out, shape.v_dim, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(*shape_out, 2, dtype=torch.float32, device=query.device)
    decode_kernel[(num_requests, head_programs, num_runs)](
        query,
        page_view(cache.keys, shape.fp8_mantissa),
        page_view(cache.values, shape.fp8_mantissa),
        partial_sums,
        partial_stats,
        tables,
        table_places,
        metadata.first_blocks,
        metadata.seq_lens,
        first_keys,
        params.scale * params.k_scale,
        params.softcap or 0.0,
        shape.reach,
        query.stride(0),
        query.stride(1),
        cache.keys.stride(0),
        cache.values.stride(0),
        metadata.block_tables.stride(0),
        scratch_segments,
        segments_per_program,
        **constants,
        **tile.launch_options,
    )
    merge_kernel[(num_requests, params.num_heads)](
        partial_sums,
        partial_stats,
        params.sinks,
        out,
        metadata.seq_lens,
        first_keys,
        params.v_scale,
        shape.reach,
        out.stride(0),
        scratch_segments,
        **merge_constants(shape, **segments, has_sinks=params.sinks is not None),
        **MERGE_TILE.launch_options,
    )


def count_scratch_segments(max_tokens: int, reach_tokens: int | None, *, segment_tokens: int, max_segments: int) -> int:
    """Most segments that any request has whose block table covers `max_tokens`."""
    if reach_tokens is not None:
        max_tokens = min(max_tokens, reach_tokens)
    # max_tokens in a row can touch as many segments of the shortest length as the first term says, and one more. Where
    # segments are longer, max_segments of them hold what is seen, and one more if the first begins before it.
    return min((max_tokens + segment_tokens - 2) // segment_tokens, max_segments) + 1


def decode_constants(
    shape: LayerShape, tile: Tile, *, segment_tokens: int, max_segments: int, has_softcap: bool
) -> dict[str, int]:
    """Compile-time constants of `decode_kernel`."""
    return shape.constants | {
        "HAS_SOFTCAP": has_softcap,
        "GROUP_BLOCK": min(shape.group, tile.block_m),
        "SEGMENT": segment_tokens,
        "MAX_SEGMENTS": max_segments,
        "BLOCK_M": min(tile.block_m, triton.next_power_of_2(max(16, shape.group))),
        "BLOCK_N": tile.block_n,
    }


def merge_constants(shape: LayerShape, *, segment_tokens: int, max_segments: int, has_sinks: bool) -> dict[str, int]:
    """Compile-time constants of `merge_kernel`."""
    return {
        "RULE": shape.rule,
        "HAS_SINKS": has_sinks,
        "NUM_HEADS": shape.num_kv_heads * shape.group,
        "V_DIM": shape.v_dim,
        "V_PADDED": shape.constants["V_PADDED"],
        "SEGMENT": segment_tokens,
        "MAX_SEGMENTS": max_segments,
        "BLOCK_S": MERGED_SEGMENTS,
    }
