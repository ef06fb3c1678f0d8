"""Steps that are planned and not processed yet, and what the next plan builds on.

Of each row there are two positions: what is *processed* (`RequestRows.num_computed`, `num_tokens`: steps whose
results are in), and what is *reached* when all planned steps have run. Plans go by the second, all else by the first:
what is freed, cached, preempted, rolled back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import StepResult


class PlannedStep(NamedTuple):
    rows: np.ndarray  # int64 [R], in the plan's order
    num_new: np.ndarray  # int64 [R], tokens that the step computes of each
    sampled_rows: np.ndarray  # int64 [S], those of `rows` that get a token
    admitted: frozenset[int]  # those of `rows` that this step is the first of

    @property
    def prompt_rows(self) -> set[int]:
        """Those of `rows` whose prompts it computes, but for one that has a single token left."""
        return {*self.admitted, *self.rows[self.num_new > 1].tolist()}

    def without(self, leaving: list[int], result: StepResult) -> tuple[PlannedStep, StepResult]:
        """The step and what it gave the other rows, as if these had not been in it."""
        stays = ~np.isin(self.rows, leaving)
        kept = (~np.isin(self.sampled_rows, leaving)).nonzero()[0]
        step = PlannedStep(self.rows[stays], self.num_new[stays], self.sampled_rows[kept], self.admitted)
        return step, result.part(kept)


class Reached(NamedTuple):
    """How far each row is when all planned steps have run, int64 [num_rows] each.

    num_tokens counts the token that a planned step will sample; token_sources says where in that step's S it will be,
    -1 where the last token is known. None: all are known.
    """

    num_computed: np.ndarray
    num_tokens: np.ndarray
    token_sources: np.ndarray | None

    @classmethod
    def after(cls, rows: RequestRows, step: PlannedStep | None) -> Reached:
        """step: the only one that is planned and not processed; None: there is none."""
        if step is None:
            return cls(rows.num_computed, rows.num_tokens, None)
        num_computed, num_tokens = rows.num_computed.copy(), rows.num_tokens.copy()
        num_computed[step.rows] += step.num_new
        num_tokens[step.sampled_rows] += 1
        token_sources = np.full(len(num_tokens), -1, dtype=np.int64)
        token_sources[step.sampled_rows] = np.arange(len(step.sampled_rows))
        return cls(num_computed, num_tokens, token_sources)
