"""Slots of the keys that each decode request sees, written on the device.

Two forms. The ragged one (`window_kv_indices`) is a prefix sum and a gather, made anew each step. The row form
(`WindowRows`) is advanced by one token a step without looking at the window again: each request has a row with room for
two windows, in which the window's slots move to the right; a row that is full is moved back to its beginning, once in
`reach` steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lamella.attention.metadata import AttentionMetadata
from lamella.attention.triton.device_functions import first_visible
from lamella.attention.triton.shapes import visibility_rule
from lamella.errors import ConfigError
from lamella.kv_cache.spec import KVCacheSpec

BLOCK = 256


@triton.jit
def window_of(request, seq_lens, first_keys, reach, RULE: tl.constexpr, present):
    """(first key that the request's last token sees, how many it sees); 0 of them where `present` is false."""
    seq_len = tl.load(seq_lens + request, mask=present, other=0)
    first = tl.maximum(first_visible(seq_len - 1, reach, RULE), tl.load(first_keys + request, mask=present, other=0))
    return first, tl.where(seq_len > 0, seq_len - first, 0)


@triton.jit
def slots_of(positions, table, present, PAGE_TOKENS: tl.constexpr):
    """Slots of positions, -1 in a null page; `table` points at the entry of block 0, were there one."""
    pages = tl.load(table + positions // PAGE_TOKENS, mask=present, other=-1)
    return tl.where(pages >= 0, pages * PAGE_TOKENS + positions % PAGE_TOKENS, -1)


@triton.jit(do_not_specialize=("num_requests",))
def window_indptr_kernel(indptr, seq_lens, first_keys, reach, num_requests, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the prefix sum of the windows' lengths."""
    total = num_requests * 0
    tl.store(indptr, total)
    for begin in range(0, num_requests, BLOCK):
        request = begin + tl.arange(0, BLOCK)
        present = request < num_requests
        _, length = window_of(request, seq_lens, first_keys, reach, RULE, present)
        tl.store(indptr + 1 + request, total + tl.cumsum(length, 0), mask=present)
        total += tl.sum(length, 0).to(total.dtype)


@triton.jit(do_not_specialize=("table_stride", "row_stride"))
def window_slots_kernel(
    slots,
    begins,
    row_stride,
    block_tables,
    seq_lens,
    first_blocks,
    first_keys,
    reach,
    table_stride,
    RULE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request, block of its window). Its slots begin at begins[request] + request * row_stride."""
    request = tl.program_id(0).to(tl.int64)
    first, length = window_of(request, seq_lens, first_keys, reach, RULE, request >= 0)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = number < length
    table = block_tables + request * table_stride - tl.load(first_blocks + request)
    target = slots + request * row_stride + tl.load(begins + request) + number
    tl.store(target, slots_of(first + number, table, present, PAGE_TOKENS), mask=present)


@triton.jit(do_not_specialize=("table_stride", "row_stride"))
def advance_kernel(
    slots,
    begins,
    ends,
    row_stride,
    block_tables,
    seq_lens,
    first_blocks,
    first_keys,
    reach,
    table_stride,
    RULE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request): add the newest token's slot, drop those that left the window."""
    request = tl.program_id(0).to(tl.int64)
    _, length = window_of(request, seq_lens, first_keys, reach, RULE, request >= 0)
    row = slots + request * row_stride
    end = tl.load(ends + request)
    kept = length - 1
    begin = end - kept
    if end == row_stride:
        # No more than half a row: source and target do not overlap.
        for number in range(0, kept, BLOCK):
            moved = number + tl.arange(0, BLOCK)
            tl.store(row + moved, tl.load(row + begin + moved, mask=moved < kept), mask=moved < kept)
        begin = begin * 0
        end = kept
    last = tl.load(seq_lens + request) - 1
    table = block_tables + request * table_stride - tl.load(first_blocks + request)
    tl.store(row + end, slots_of(last, table, last >= 0, PAGE_TOKENS))
    tl.store(begins + request, begin)
    tl.store(ends + request, end + 1)


def window_kv_indices(spec: KVCacheSpec, metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """As `metadata.window_kv_indices`, on the device and without waiting for it.

    Returns (indptr int64 [num_decodes + 1], indices int64 [num_decodes * the most one can see]); what lies behind
    indptr[-1] is not written.
    """
    num_requests = metadata.num_decodes
    rule, reach = visibility_rule(spec)
    device = metadata.block_tables.device
    max_tokens = metadata.block_tables.shape[1] * metadata.page_tokens
    if reach:
        max_tokens = min(max_tokens, reach)
    indptr = torch.empty(num_requests + 1, dtype=torch.int64, device=device)
    indices = torch.empty(num_requests * max_tokens, dtype=torch.int64, device=device)
    window_indptr_kernel[(1,)](
        indptr, metadata.seq_lens, metadata.first_keys, reach, num_requests, RULE=rule, BLOCK=BLOCK
    )
    if indices.numel():
        _write_windows(indices, indptr, 0, max_tokens, rule, reach, metadata)
    return indptr, indices


def _write_windows(
    slots: torch.Tensor,
    begins: torch.Tensor,
    row_stride: int,
    max_tokens: int,
    rule: int,
    reach: int,
    metadata: AttentionMetadata,
) -> None:
    window_slots_kernel[(metadata.num_decodes, triton.cdiv(max_tokens, BLOCK))](
        slots,
        begins,
        row_stride,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.first_blocks,
        metadata.first_keys,
        reach,
        metadata.block_tables.stride(0),
        RULE=rule,
        PAGE_TOKENS=metadata.page_tokens,
        BLOCK=BLOCK,
    )


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The windows of a batch of decode requests, kept from step to step.

    Request i sees slots[i, begins[i]:ends[i]], oldest first. slots: int64 [R, 2 * reach]; begins, ends: int64 [R].
    """

    spec: KVCacheSpec
    slots: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def build(spec: KVCacheSpec, metadata: AttentionMetadata) -> WindowRows:
        """Of the decode requests of `metadata`. Raises ConfigError for full attention, whose context has no bound."""
        rule, reach = visibility_rule(spec)
        if not reach:
            raise ConfigError(
                "a full-attention layer has no window to keep; read its block table, or list its slots with "
                "window_kv_indices"
            )
        num_requests = metadata.num_decodes
        begins = torch.zeros(num_requests, dtype=torch.int64, device=metadata.block_tables.device)
        slots = begins.new_empty(num_requests, 2 * reach)
        indptr, _ = window_kv_indices(spec, metadata)
        if num_requests:
            _write_windows(slots, begins, slots.stride(0), reach, rule, reach, metadata)
        return WindowRows(spec, slots, begins, torch.diff(indptr))

    def advance(self, metadata: AttentionMetadata) -> None:
        """The same requests have come one token further: add its slot, drop what they no longer see. In place."""
        rule, reach = visibility_rule(self.spec)
        if len(self.begins):
            advance_kernel[(len(self.begins),)](
                self.slots,
                self.begins,
                self.ends,
                self.slots.stride(0),
                metadata.block_tables,
                metadata.seq_lens,
                metadata.first_blocks,
                metadata.first_keys,
                reach,
                metadata.block_tables.stride(0),
                RULE=rule,
                PAGE_TOKENS=metadata.page_tokens,
                BLOCK=BLOCK,
            )
