"""How much memory the largest step takes, by running it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend
from lamella.errors import CapacityError
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.memory import MemoryProfile, allocate_arena
from lamella.kv_cache.page_transfers import PageCopies
from lamella.kv_cache.spec import KVCacheSpec, ceil_div
from lamella.kv_cache.step_memory import GroupPlan
from lamella.model_executor.decode_graphs import batch_sizes
from lamella.model_executor.runner import ModelRunner, RunnableModel
from lamella.model_executor.step_buffers import NO_SLOT, NULL_PAGE
from lamella.model_executor.step_plan import SamplingBatch, StepPlan

# Memory of a captured graph besides the tensors of its run: its nodes with their arguments, and the rounding of the
# pool. It is set aside before the capture and compared with what was taken afterwards.
GRAPH_OVERHEAD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """Bounds that no step exceeds. Blocks of each group: table_widths, that a decoding request's table covers;
    line_widths, that any request's does."""

    num_requests: int
    num_tokens: int
    table_widths: tuple[int, ...]
    line_widths: tuple[int, ...]


class MemoryMeter(Protocol):
    """A device's memory, in bytes."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def held_bytes(self) -> int:
        """Bytes that this process's tensors hold now."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most that this process's tensors hold while `run` runs, beyond what they held before."""
        ...


class CudaMeter:
    """Counts the memory that torch's allocator has taken from the device, whether used or not: nobody else can have
    it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        self._give_back()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held_bytes(self) -> int:
        self._give_back()
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        before = self.held_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def profile_memory(
    stack: RunnableModel,
    backend: AttentionBackend,
    layout: KVLayout,
    attention_specs: list[KVCacheSpec],
    meter: MemoryMeter,
    largest: LargestBatch,
    *,
    kv_dtype: torch.dtype,
    with_graphs: bool,
) -> MemoryProfile:
    """Run the largest steps that there can be, over null pages of `kv_dtype`, and note how much memory they take. All
    of it is free afterwards, except what libraries keep.

    The largest steps: all tokens as prompts of as many requests as run at once, each of which samples; and a token of
    each of those requests, over the widest block tables.
    """
    device = stack.device
    arena = allocate_arena(layout, 1, device)
    runner = ModelRunner(stack, backend, layout, attention_specs, arena, kv_dtype=kv_dtype, prunes=False)
    runner.reserve_tables(largest.num_requests, largest.line_widths)
    tables_bytes = runner.tables.num_bytes
    plans = prompts_plan(layout, largest), decodes_plan(layout, largest)
    try:
        for plan in plans:  # first, so that kernels are compiled and libraries have their workspaces
            runner.execute(plan)
        step_bytes = max(meter.peak_bytes(partial(runner.execute, plan)) for plan in plans)
        graph_bytes = _graph_bytes(runner, meter, largest) if with_graphs else 0
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"max_num_batched_tokens={largest.num_tokens} and max_num_seqs={largest.num_requests}: the largest step "
            f"finds no room beside weights of {meter.held_bytes() / 2**30:.2f} GiB, {meter.free_bytes() / 2**30:.2f} "
            "GiB are free; lower them, or free memory that others hold"
        ) from error
    del runner, arena
    held_bytes, total_bytes = meter.held_bytes(), meter.total_bytes()
    return MemoryProfile(
        total_bytes=total_bytes,
        foreign_bytes=total_bytes - meter.free_bytes() - held_bytes,
        weights_bytes=held_bytes,
        step_bytes=step_bytes + tables_bytes,
        graph_bytes=graph_bytes,
    )


class _NoGraphs:
    """Runs what it is asked to capture; the memory that this takes is what a graph's pool would keep."""

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        run()
        return _nothing


def _nothing() -> None:
    pass


def _graph_bytes(runner: ModelRunner, meter: MemoryMeter, largest: LargestBatch) -> int:
    """What captured graphs will keep: buffers, one pool for the largest, and each one's own part."""
    capture = partial(
        runner.capture_decodes, _NoGraphs(), max_num_seqs=largest.num_requests, table_widths=largest.table_widths
    )
    return meter.peak_bytes(capture) + len(batch_sizes(largest.num_requests)) * GRAPH_OVERHEAD_BYTES


def prompts_plan(layout: KVLayout, largest: LargestBatch) -> StepPlan:
    """All tokens as prompts of as many requests as run at once, over null pages; each samples."""
    num_requests, num_tokens = min(largest.num_requests, largest.num_tokens), largest.num_tokens
    lengths = np.full(num_requests, num_tokens // num_requests)
    lengths[num_requests - num_tokens % num_requests :] += 1
    query_start = np.zeros(num_requests + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    return _null_plan(
        positions=np.arange(num_tokens) - np.repeat(query_start[:-1], lengths),
        query_start=query_start,
        seq_lens=lengths,
        table_widths=(ceil_div(int(lengths[-1]), layout.page_tokens),) * len(layout.groups),
        num_blocks=ceil_div(int(lengths[-1]), layout.page_tokens),
    )


def decodes_plan(layout: KVLayout, largest: LargestBatch) -> StepPlan:
    """A token of each request over the widest block tables, of null pages; each samples."""
    num_requests, num_blocks = largest.num_requests, max(largest.table_widths)
    seq_lens = np.full(num_requests, num_blocks * layout.page_tokens)
    return _null_plan(
        positions=seq_lens - 1,
        query_start=np.arange(num_requests + 1),
        seq_lens=seq_lens,
        table_widths=largest.table_widths,
        num_blocks=num_blocks,
    )


def _null_plan(
    *,
    positions: np.ndarray,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    table_widths: tuple[int, ...],
    num_blocks: int,
) -> StepPlan:
    """A plan of token 0 everywhere, over null pages. num_blocks: how many the longest request has; each table covers
    the last of them."""
    none = np.zeros(0, dtype=np.int64)
    num_requests, num_tokens = len(seq_lens), len(positions)
    zeros = np.zeros(num_requests, dtype=np.int64)
    groups = tuple(
        GroupPlan(
            block_tables=np.full((num_requests, width), NULL_PAGE, dtype=np.int64),
            first_blocks=np.full(num_requests, num_blocks - width, dtype=np.int64),
            first_keys=zeros,
            slot_mapping=np.full(num_tokens, NO_SLOT, dtype=np.int64),
            copies=PageCopies(none, none),
        )
        for width in table_widths
    )
    return StepPlan(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        num_decodes=int((np.diff(query_start) == 1).sum()),
        moves=(),
        groups=groups,
        first_step_slot=0,
        num_sampled=np.ones(num_requests, dtype=np.int64),
        # Nucleus sampling over the whole vocabulary takes the most memory.
        sampling=SamplingBatch(
            temperature=np.ones(num_requests),
            top_k=zeros,
            top_p=np.full(num_requests, 0.9),
            min_p=np.zeros(num_requests),
            seeds=np.zeros(num_requests, dtype=np.uint64),
            draw_index=zeros,
            num_logprobs=np.full(num_requests, -1, dtype=np.int64),
            banned_token_ids={},
        ),
    )
