"""Turns "these rows compute so many tokens" into the arrays of a StepPlan."""

from __future__ import annotations

import numpy as np

from lamella.engine.request_rows import RequestRows
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.model_executor.step_plan import GroupPlan, PageCopies, StepPlan


def build_step_plan(
    rows: RequestRows, manager: HybridBlockManager, scheduled: np.ndarray, num_new: np.ndarray
) -> StepPlan:
    """scheduled: int64 [R] rows, those with one new token first; num_new: int64 [R] tokens each."""
    num_computed = rows.num_computed[scheduled]
    seq_lens = num_computed + num_new
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(num_new, out=query_start[1:])
    request_of_token = np.repeat(np.arange(len(scheduled)), num_new)
    positions = np.arange(query_start[-1]) - (query_start[:-1] - num_computed)[request_of_token]
    row_of_token = scheduled[request_of_token]
    sample_requests = np.flatnonzero(seq_lens == rows.num_tokens[scheduled])
    blocks = positions // manager.page_tokens
    offsets = positions % manager.page_tokens
    copies = manager.planned_copies()
    groups = []
    for group in range(manager.num_groups):
        table = manager.tables[group]
        first_blocks = manager.first_kept[group, scheduled]
        width = int((manager.num_blocks[scheduled] - first_blocks).max())
        if first_blocks.any():
            columns = first_blocks[:, None] + np.arange(width)
            inside = columns < table.shape[1]
            block_tables = table[scheduled[:, None], np.where(inside, columns, 0)]
            block_tables[~inside] = NULL_PAGE
        else:
            block_tables = table[:, :width].take(scheduled, axis=0)
        slot_mapping = table[row_of_token, blocks] * manager.page_tokens + offsets
        source_pages, target_pages = copies[group]
        groups.append(GroupPlan(block_tables, first_blocks, slot_mapping, PageCopies(source_pages, target_pages)))
    return StepPlan(
        token_ids=rows.tokens[row_of_token, positions].astype(np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        num_decodes=int((num_new == 1).sum()),
        groups=tuple(groups),
        sample_requests=sample_requests,
        sampling=rows.sampling_batch(scheduled[sample_requests]),
    )
