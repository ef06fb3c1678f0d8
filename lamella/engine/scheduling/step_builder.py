"""Turns "these rows compute so many tokens" into the arrays of a StepPlan."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.gathered_tables import GatheredTables
from lamella.engine.scheduling.planned_steps import Reached
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.model_executor.step_plan import GroupPlan, PageCopies, PageMoves, StepPlan


def build_step_plan(
    rows: RequestRows,
    manager: HybridBlockManager,
    tables: GatheredTables,
    scheduled: np.ndarray,
    num_new: np.ndarray,
    reached: Reached,
) -> StepPlan:
    """scheduled: int64 [R] rows, those with one new token first; num_new: int64 [R] tokens each, from where the rows
    are when all steps planned before have run.

    tables: of `manager`. Its arrays are the plan's, so a plan holds until two more have been built.
    """
    num_requests, page_tokens = len(scheduled), manager.page_tokens
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
    is_complete = seq_lens == reached.num_tokens[scheduled]  # then one token is sampled, behind the last
    blocks = positions // page_tokens
    offsets = positions - blocks * page_tokens
    read_only = _read_only(manager, row_of_token, positions)
    groups = []
    gathered = zip(
        manager.tree.specs,
        manager.tables,
        tables.gather(scheduled),
        manager.first_keys,
        manager.planned_copies(),
        strict=True,
    )
    for spec, table, (block_tables, first_blocks), first_keys, (source_pages, target_pages) in gathered:
        slot_mapping = table[row_of_token, blocks] * page_tokens + offsets
        if read_only is not None and not spec.is_windowed:
            slot_mapping[read_only] = -1
        groups.append(
            GroupPlan(
                block_tables=block_tables,
                first_blocks=first_blocks,
                first_keys=first_keys.take(scheduled),
                slot_mapping=slot_mapping,
                copies=PageCopies(source_pages, target_pages),
            )
        )
    return StepPlan(
        token_ids=rows.tokens[row_of_token, positions].astype(np.int64),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        moves=tuple(PageMoves(*moved) for moved in manager.moves),
        groups=tuple(groups),
        first_step_slot=manager.step_pages.first_page * page_tokens,
        num_sampled=is_complete.astype(np.int64),
        sampling=rows.sampling_batch(scheduled[is_complete], reached.num_tokens),
        token_sources=_token_sources(rows, reached, row_of_token, positions),
    )


def _token_sources(
    rows: RequestRows, reached: Reached, row_of_token: np.ndarray, positions: np.ndarray
) -> np.ndarray | None:
    """Which tokens are samples of the step in flight: see StepPlan."""
    if reached.token_sources is None:
        return None
    sources = np.where(positions == rows.num_tokens[row_of_token], reached.token_sources[row_of_token], -1)
    return sources if sources.max() >= 0 else None


def _read_only(manager: HybridBlockManager, row_of_token: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """Which tokens are replayed (bool [T]): their full-attention KV is in the cache. None: none."""
    if not manager.replaying:
        return None
    ends = np.zeros(len(manager.frontier), dtype=np.int64)
    ends[list(manager.replaying)] = list(manager.replaying.values())
    is_replayed: np.ndarray = positions < ends[row_of_token]
    return is_replayed
