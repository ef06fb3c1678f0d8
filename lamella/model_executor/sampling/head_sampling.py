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
    log-probabilities need the whole row.
    """
    num_rows = len(batch.temperature)
    needs_all = batch.num_logprobs >= 0
    needs_all[batch.edited_rows] = True
    is_greedy = ~needs_all & (batch.temperature == 0)
    has_top = ~needs_all & ~is_greedy & (batch.top_k > 0) & (batch.top_k <= MAX_TOP)
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
    rows = np.flatnonzero(~is_greedy & ~has_top)
    if len(rows):
        result = sampler(scores.logits(torch.from_numpy(rows)), batch.part(rows))
        token_ids[rows] = result.token_ids
        logprobs = {int(rows[index]): found for index, found in result.logprobs.items()}
        unusable |= {int(rows[index]): problem for index, problem in result.unusable.items()}
    return StepResult(token_ids=token_ids, logprobs=logprobs, unusable=unusable)
