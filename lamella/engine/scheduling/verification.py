"""Which of a step's samples count: those behind drafts only as long as each draft is the sample before it.

A row computes its last known token t and k drafts, and a token is sampled behind each:

    computed   t    d1   d2   d3          s0 is what would have been sampled anyhow. Where it is d1, the row has now
    sampled    s0   s1   s2   s3          computed what it would have next, and s1 is its next sample, and so on.

Each sample is drawn as if it were alone: from the same logits, since products have the same bits whatever the batch,
with the same settings and its own index of the draw. So a row gets the tokens that it would have got one by one,
whatever was drafted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.planned_steps import PlannedStep
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import StepResult


class Verified(NamedTuple):
    """samples: int64 [n], which of the S samples count, in their order. offsets: int64 [n], which of its row's samples
    each is. num_rejected: int64 [R], how many of each row's new tokens are none of it. num_drafts, num_accepted: by
    the place among a row's drafts, of all rows; a draft behind a sample that ends the request is not accepted."""

    samples: np.ndarray
    offsets: np.ndarray
    num_rejected: np.ndarray
    num_drafts: np.ndarray
    num_accepted: np.ndarray


def verify(rows: RequestRows, step: PlannedStep, result: StepResult) -> Verified:
    """Compare the drafts of `step` with its samples. Needs `rows` as they were when it was planned, drafts included. A
    sample that is unusable counts, if it is reached, and none behind it. Counts drafts in the rows' requests."""
    assert step.num_drafts is not None
    token_ids = result.token_ids
    # The first sample of each row among the S.
    num_sampled = np.zeros(len(rows.num_tokens), dtype=np.int64)
    np.add.at(num_sampled, step.sampled_rows, 1)
    num_used = num_sampled[step.rows]
    starts = np.cumsum(num_used) - num_used
    num_rejected = np.zeros(len(step.rows), dtype=np.int64)
    counts = np.zeros((2, int(step.num_drafts.max(initial=0))), dtype=np.int64)
    for index in step.num_drafts.nonzero()[0].tolist():
        row, start, num_drafts = int(step.rows[index]), int(starts[index]), int(step.num_drafts[index])
        request, num_known = rows.request(row), rows.num_tokens_at[row]
        end_ids = request.eos_token_ids | request.stop_token_ids
        drafts = rows.tokens[row, num_known : num_known + num_drafts].tolist()
        num_accepted = 0
        for draft, sample in zip(drafts, token_ids[start : start + num_drafts].tolist(), strict=True):
            if sample != draft or sample in end_ids or start + num_accepted in result.unusable:
                break
            num_accepted += 1
        num_used[index] = num_accepted + 1
        num_rejected[index] = num_drafts - num_accepted
        counts[0, :num_drafts] += 1
        counts[1, :num_accepted] += 1
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
    first_used = np.cumsum(num_used) - num_used
    offsets = np.arange(num_used.sum()) - first_used.repeat(num_used)
    return Verified(starts.repeat(num_used) + offsets, offsets, num_rejected, counts[0], counts[1])
