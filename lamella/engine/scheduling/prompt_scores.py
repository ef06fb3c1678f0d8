"""Log-probabilities of a prompt's own tokens: which are wanted, which a step computes, and those that are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lamella.model_executor.step_plan import ScoredTokens, TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptScores:
    """Of one request.

    num_logprobs: how many top tokens to report for each token. found: position -> what was reported of the token there,
    given those before it; of positions from `start` on, which is 1 or more, for nothing comes before the first token.
    """

    num_logprobs: int
    start: int
    num_prompt_tokens: int
    found: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def first_missing(self) -> int:
        """The first position that nothing was reported of; the prompt's length if there is none."""
        position = self.start
        while position in self.found:
            position += 1
        return position

    @property
    def is_complete(self) -> bool:
        return len(self.found) >= self.num_prompt_tokens - self.start

    def wanted(self, num_computed: int, num_new: int) -> np.ndarray:
        """The positions (int64, ascending) that a step scores which computes so many tokens after so many: the logits
        of each token are those of the position behind it."""
        first, end = max(num_computed + 1, self.start), min(num_computed + num_new + 1, self.num_prompt_tokens)
        return np.array([position for position in range(first, end) if position not in self.found], dtype=np.int64)


def plan_scores(
    scores: Mapping[int, PromptScores],
    scheduled: np.ndarray,
    query_start: np.ndarray,
    num_computed: np.ndarray,
    tokens: np.ndarray,
) -> ScoredTokens | None:
    """What a step scores; None: nothing. scores: row -> those that are wanted. scheduled: int64 [R], the step's rows;
    query_start: int64 [R + 1], num_computed: int64 [R], as in StepPlan; tokens: int32 [num_rows, max_model_len]."""
    parts = []
    for index, row in enumerate(scheduled.tolist()):
        if row in scores:
            first, end = query_start[index : index + 2].tolist()
            positions = scores[row].wanted(int(num_computed[index]), end - first)
            if len(positions):
                places = first + positions - 1 - num_computed[index]
                parts.append((row, scores[row].num_logprobs, positions, places))
    if not parts:
        return None
    lengths = [len(positions) for _, _, positions, _ in parts]
    rows = np.repeat([row for row, _, _, _ in parts], lengths)
    positions = np.concatenate([positions for _, _, positions, _ in parts])
    return ScoredTokens(
        tokens=np.concatenate([places for _, _, _, places in parts]),
        rows=rows,
        positions=positions,
        target_ids=tokens[rows, positions].astype(np.int64),
        num_logprobs=np.repeat([num_logprobs for _, num_logprobs, _, _ in parts], lengths),
    )
