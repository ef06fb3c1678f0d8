"""Sampling where logits are computed on demand: a row whose choice depends on few columns never has all of them
written."""

from __future__ import annotations

import numpy as np
import torch

from lamella.model_executor.layers.contract import HeadScores
from lamella.model_executor.sampling.sampler import Sampler, draw_from_top, unusable_rows
from lamella.model_executor.step_plan import SamplingBatch, StepResult

MAX_TOP = 64  # the most columns that are cheaper to find than to write all


def sample_from_head(sampler: Sampler, scores: HeadScores, batch: SamplingBatch) -> StepResult:
    """What `sampler(all logits, batch)` returns, bit for bit.

    Greedy rows need one column, and rows with a small top_k need top_k of them; edits of the logits and
    log-probabilities need the whole row. A greedy row with a mask and nothing else needs it only where none of its
    largest columns is allowed, which is rare: a mask forbids little where a model knows the form it is to follow.
    """
    num_rows = len(batch.temperature)
    needs_all = batch.num_logprobs >= 0
    needs_all[batch.edited_rows] = True
    is_greedy = ~needs_all & (batch.temperature == 0)
    has_top = ~needs_all & ~is_greedy & (batch.top_k > 0) & (batch.top_k <= MAX_TOP)
    has_mask = np.zeros(num_rows, dtype=bool)
    has_mask[[*batch.masks]] = True
    has_mask[batch.edited_rows_beside_masks] = False
    has_mask &= (batch.num_logprobs < 0) & (batch.temperature == 0)
    token_ids = np.empty(num_rows, dtype=np.int64)
    logprobs = {}
    unusable: dict[int, str] = {}

    rows = np.flatnonzero(is_greedy)
    if len(rows):
        ids, values = scores.largest(torch.from_numpy(rows))
        unusable |= unusable_rows(values.numpy(), rows)
        token_ids[rows] = ids.numpy()
    rows = np.flatnonzero(has_top)
    if len(rows):
        ids, values = scores.top(torch.from_numpy(rows), int(batch.top_k[rows].max()))
        unusable |= unusable_rows(values[:, 0].numpy(), rows)
        for row, row_ids, row_values in zip(rows.tolist(), ids.numpy(), values.numpy(), strict=True):
            token_ids[row] = row_ids[0] if row in unusable else draw_from_top(row_ids, row_values, batch, row)
    rows = np.flatnonzero(has_mask)
    if len(rows):
        ids, values = scores.top(torch.from_numpy(rows), MAX_TOP)
        for row, row_ids, row_values in zip(rows.tolist(), ids.numpy(), values.numpy(), strict=True):
            allowed = batch.masks[row][row_ids >> 5] >> (row_ids & 31).astype(np.uint32) & 1
            first = int(allowed.argmax())
            has_mask[row] = bool(allowed[first]) and bool(np.isfinite(row_values[[0, first]]).all())
            token_ids[row] = row_ids[first]
    rows = np.flatnonzero(~is_greedy & ~has_top & ~has_mask)
    if len(rows):
        result = sampler(scores.logits(torch.from_numpy(rows)), batch.part(rows))
        token_ids[rows] = result.token_ids
        logprobs = {int(rows[index]): found for index, found in result.logprobs.items()}
        unusable |= {int(rows[index]): problem for index, problem in result.unusable.items()}
    return StepResult(token_ids=token_ids, logprobs=logprobs, unusable=unusable)
