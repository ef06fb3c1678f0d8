"""Turns "these rows compute so many tokens" into the arrays of a StepPlan."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.planned_steps import Reached
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import BlockManager
from lamella.model_executor.step_plan import StepPlan


def build_step_plan(
    rows: RequestRows,
    manager: BlockManager,
    scheduled: np.ndarray,
    num_new: np.ndarray,
    reached: Reached,
    is_long_text: np.ndarray | None = None,
    num_drafts: np.ndarray | None = None,
) -> StepPlan:
    """scheduled: int64 [R], the rows of the step, those with one new token first. num_new: int64 [R], how many tokens
    each computes, from the position where it is when all steps planned before have run. is_long_text: bool [R], see
    LongTexts; None: no row has a long text. num_drafts: int64 [R], how many of a row's new tokens are drafts: they
    stand in `rows.tokens` behind those that are known. None: none are. A plan holds until two more have been built.
    """
    num_requests = len(scheduled)
    num_computed = reached.num_computed[scheduled]
    seq_lens = num_computed + num_new
    if num_new[-1] == 1:  # pure decode
        num_decodes = num_requests
        query_start = np.arange(num_requests + 1)
        positions, row_of_token = num_computed, scheduled
    else:
        num_decodes = int((num_new == 1).sum())
        query_start = np.zeros(num_requests + 1, dtype=np.int64)
        np.cumsum(num_new, out=query_start[1:])
        request_of_token = np.repeat(np.arange(num_requests), num_new)
        positions = np.arange(query_start[-1]) - (query_start[:-1] - num_computed)[request_of_token]
        row_of_token = scheduled[request_of_token]
    num_known = reached.num_tokens[scheduled]
    if num_drafts is None:
        is_complete = seq_lens == num_known  # behind the last token of such a row one is sampled
        num_sampled = is_complete.astype(np.int64)
        sampled_rows, num_before = scheduled[is_complete], num_known[is_complete]
    else:  # and behind the last token that is known and each draft, where there are drafts
        num_sampled = np.where(seq_lens == num_known + num_drafts, 1 + num_drafts, 0)
        sampled_rows = scheduled.repeat(num_sampled)
        offsets = np.arange(len(sampled_rows)) - (np.cumsum(num_sampled) - num_sampled).repeat(num_sampled)
        num_before = num_known.repeat(num_sampled) + offsets
    memory = manager.plan_step(scheduled, row_of_token, positions)
    return StepPlan(
        token_ids=rows.tokens[row_of_token, positions].astype(np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        moves=memory.moves,
        groups=memory.groups,
        tables=memory.tables,
        first_step_slot=memory.first_step_slot,
        num_sampled=num_sampled,
        sampling=rows.sampling_batch(sampled_rows, num_before),
        token_sources=_token_sources(rows, reached, row_of_token, positions),
        is_long_text=is_long_text,
        scored=rows.scored_tokens(scheduled, query_start, num_computed),
        adapter_ids=rows.adapter_ids_of(scheduled),
    )


def _token_sources(
    rows: RequestRows, reached: Reached, row_of_token: np.ndarray, positions: np.ndarray
) -> np.ndarray | None:
    """Which tokens are samples of the step in flight: see StepPlan."""
    if reached.token_sources is None:
        return None
    sources = np.where(positions == rows.num_tokens[row_of_token], reached.token_sources[row_of_token], -1)
    return sources if sources.max() >= 0 else None
