"""Where the keys are that each decode request sees in a windowed group, listed on the device once per step.

`indices` has the pages that hold a request's window, in order, and the requests' lists follow each other as `indptr`
says. An entry is a page; where pages are of one token it is the token's slot. The layers of the group read the lists,
so that none of them looks into block tables, whose lines wrap around and go on beyond the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lamella.attention.metadata import AttentionMetadata
from lamella.attention.triton.device_functions import first_visible
from lamella.attention.triton.shapes import visibility_rule
from lamella.kv_cache.spec import KVCacheSpec

BLOCK = 256
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class WindowIndices:
    """The windows of R decode requests.

    Request i sees the tokens from position first_keys[i] to its newest. They are in the pages
    indices[indptr[i]:indptr[i + 1]], the first of them from token first_keys[i] % page_tokens of its page on; -1 is the
    null page. What lies behind indptr[R] is not written.
    """

    indptr: torch.Tensor  # int64 [R + 1]
    indices: torch.Tensor  # int64 [R * the most pages that one can see]
    first_keys: torch.Tensor  # int64 [R]


@triton.jit
def window_of(request, present, seq_lens, first_keys, reach, RULE: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """(first key that the request's last token sees, number of pages that hold the keys from there on). The number is 0
    where the request has no tokens or `present` is false."""
    seq_len = tl.load(seq_lens + request, mask=present, other=0)
    first = tl.maximum(first_visible(seq_len - 1, reach, RULE), tl.load(first_keys + request, mask=present, other=0))
    return first, tl.where(seq_len > 0, tl.cdiv(seq_len, PAGE_TOKENS) - first // PAGE_TOKENS, 0)


@triton.jit(do_not_specialize=("table_stride", "table_width"))
def window_indices_kernel(
    indptr,
    indices,
    window_first_keys,
    block_tables,
    table_rows,
    first_blocks,
    seq_lens,
    first_keys,
    reach,
    table_stride,
    table_width,
    RULE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request, block of its list). Each program adds up by itself where its list begins, from the windows of
    the requests before: these are few, and a launch for the sum would cost more."""
    request = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int64)
    for low in range(0, request, BLOCK):
        others = low + tl.arange(0, BLOCK)
        _, counts = window_of(others, others < request, seq_lens, first_keys, reach, RULE, PAGE_TOKENS)
        before += counts
    begin = tl.sum(before, 0)
    first, count = window_of(request, request >= 0, seq_lens, first_keys, reach, RULE, PAGE_TOKENS)

    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = number < count
    block = number + (first // PAGE_TOKENS - tl.load(first_blocks + request)).to(tl.int32)
    line = block_tables + tl.load(table_rows + request) * table_stride
    pages = tl.load(line + block % table_width, mask=present, other=-1)
    tl.store(indices + begin + number, pages, mask=present)
    if tl.program_id(1) == 0:
        tl.store(window_first_keys + request, first)
        tl.store(indptr + request, begin)
        if request == tl.num_programs(0) - 1:
            tl.store(indptr + request + 1, begin + count)


def window_kv_indices(spec: KVCacheSpec, metadata: AttentionMetadata) -> WindowIndices:
    """List the windows of the decode requests of `metadata`, at least one, for a spec with a window. Nothing waits for
    the device: grid and sizes follow from the number of requests and the width of their tables on the host."""
    rule, reach = visibility_rule(spec)
    num_requests, page_tokens = metadata.num_decodes, metadata.page_tokens
    # A window touches the most pages when its first token is the last one of a page.
    most_pages = min(metadata.block_tables_host.shape[1], (reach + page_tokens - 2) // page_tokens + 1)
    made = metadata.seq_lens.new_empty
    windows = WindowIndices(made(num_requests + 1), made(num_requests * most_pages), made(num_requests))
    window_indices_kernel[(num_requests, max(1, triton.cdiv(most_pages, BLOCK)))](
        windows.indptr,
        windows.indices,
        windows.first_keys,
        metadata.block_tables,
        metadata.table_rows,
        metadata.first_blocks,
        metadata.seq_lens,
        metadata.first_keys,
        reach,
        metadata.block_tables.stride(0),
        metadata.block_tables.shape[1],
        RULE=rule,
        PAGE_TOKENS=page_tokens,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return windows
