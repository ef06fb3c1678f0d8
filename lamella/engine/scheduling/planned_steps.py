"""Steps that are planned and not processed yet, and what the next plan builds on.

Each row has two positions. *Processed* counts the steps whose results are in (`RequestRows.num_computed`,
`num_tokens`). *Reached* is where the row will be when all planned steps have run. The next plan begins at what is
reached. All else goes by what is processed: what is freed, cached, preempted or rolled back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import ScoredTokens, StepResult


class PlannedStep(NamedTuple):
    rows: np.ndarray  # int64 [R], in the plan's order
    num_new: np.ndarray  # int64 [R], tokens that the step computes of each row
    sampled_rows: np.ndarray  # int64 [S], those of `rows` that get a token; once for each sample
    admitted: frozenset[int]  # those of `rows` whose first step this is
    scored: ScoredTokens | None = None  # what else the step finds out
    num_drafts: np.ndarray | None = None  # int64 [R], how many of each row's new tokens are drafts; None: none are

    @property
    def prompt_rows(self) -> set[int]:
        """Those of `rows` whose prompts the step computes. A row that is not new and has only one prompt token left is
        not among them."""
        num_known = self.num_new if self.num_drafts is None else self.num_new - self.num_drafts
        return {*self.admitted, *self.rows[num_known > 1].tolist()}

    def without(self, leaving: list[int], result: StepResult) -> tuple[PlannedStep, StepResult]:
        """The step and what it gave the other rows, as if these had not been in it."""
        stays = ~np.isin(self.rows, leaving)
        kept = (~np.isin(self.sampled_rows, leaving)).nonzero()[0]
        num_drafts = None if self.num_drafts is None else self.num_drafts[stays]
        step = PlannedStep(
            self.rows[stays], self.num_new[stays], self.sampled_rows[kept], self.admitted, num_drafts=num_drafts
        )
        return step, result.part(kept)


class Reached(NamedTuple):
    """How far each row is when all planned steps have run, int64 [num_rows] each.

    num_tokens counts the token that a planned step will sample, too. token_sources has the index of that token among
    the step's S samples, and -1 where the row's last token is known already. None: all are known.
    """

    num_computed: np.ndarray
    num_tokens: np.ndarray
    token_sources: np.ndarray | None

    @classmethod
    def after(cls, rows: RequestRows, step: PlannedStep | None) -> Reached:
        """step: the only one that is planned and not processed; None: there is none. It has no drafts, for how far
        these bring a row is not known before it has run."""
        if step is None:
            return cls(rows.num_computed, rows.num_tokens, None)
        num_computed, num_tokens = rows.num_computed.copy(), rows.num_tokens.copy()
        num_computed[step.rows] += step.num_new
        num_tokens[step.sampled_rows] += 1
        token_sources = np.full(len(num_tokens), -1, dtype=np.int64)
        token_sources[step.sampled_rows] = np.arange(len(step.sampled_rows))
        return cls(num_computed, num_tokens, token_sources)
