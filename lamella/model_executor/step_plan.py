"""What one step runs. The scheduler makes it, the runner takes it; neither reaches into the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.step_memory import GroupPlan


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """What one row's penalties are and which tokens they are for, each once, in any order.

    A positive logit is divided by `repetition`, another multiplied with it; then `frequency` times the token's count in
    the output is subtracted, and `presence` where that is not 0. Off: 1, 0, 0.
    """

    repetition: float
    presence: float
    frequency: float
    token_ids: np.ndarray  # int64 [n]: those in prompt or output
    output_counts: np.ndarray  # int64 [n]: how often each is in the output


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample each of the `S` rows that need a token.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off. A draw depends on (seed, draw_index)
    alone: draw_index is how many tokens the request has sampled before.
    banned_token_ids[i]: ids that row i may not produce (end tokens before min_tokens).
    penalties[i]: of row i, where it has any.
    num_logprobs[i]: -1 for none, else how many top log-probabilities to return besides the
    sampled token's own.
    """

    temperature: np.ndarray  # float64 [S]
    top_k: np.ndarray  # int64 [S]
    top_p: np.ndarray  # float64 [S]
    min_p: np.ndarray  # float64 [S]
    seeds: np.ndarray  # uint64 [S]
    draw_index: np.ndarray  # int64 [S]
    num_logprobs: np.ndarray  # int64 [S]
    banned_token_ids: dict[int, tuple[int, ...]]
    penalties: dict[int, TokenPenalties] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A ragged batch: R requests, T new tokens, S rows to sample.

    Requests with one new token whose context is complete come first (`num_decodes` of them).
    The arrays are the planner's too: whoever runs the step only reads them, and is done with them when the second
    plan after this one is made.
    """

    token_ids: np.ndarray  # int64 [T]; without meaning where token_sources names a sample
    positions: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int64 [R + 1]
    seq_lens: np.ndarray  # int64 [R]
    num_decodes: int
    moves: tuple[PageMoves, ...]  # in this order: a page may move on, and its place be used again
    groups: tuple[GroupPlan, ...]
    first_step_slot: int  # slots from here on lie in step pages: what they hold is for this step alone
    sample_requests: np.ndarray  # int64 [S], which of the R requests get a token
    sampling: SamplingBatch
    # int64 [T]: which of the S samples of the step launched before is the token; -1: it is in token_ids. None: all are.
    token_sources: np.ndarray | None = None

    @property
    def sampled_tokens(self) -> np.ndarray:
        """int64 [S], which of the T tokens are followed by one that is sampled."""
        last_tokens: np.ndarray = self.query_start[1:][self.sample_requests] - 1
        return last_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token: its own and the `k` most likely ids with theirs."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: np.ndarray  # int64 [k]
    top_logprobs: np.ndarray  # float32 [k]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One sampled token per row of StepPlan.sample_requests.

    unusable: row of the S -> why no token could be chosen; its token_ids entry is some id of the vocabulary.
    """

    token_ids: np.ndarray  # int64 [S]
    logprobs: dict[int, TokenLogprobs]  # row of the S -> its log-probabilities, where asked for
    unusable: dict[int, str] = field(default_factory=dict)

    def part(self, rows: np.ndarray) -> StepResult:
        """The result of these of the S rows alone (int64, none twice), in this order."""
        places = {row: place for place, row in enumerate(rows.tolist())}
        return StepResult(
            token_ids=self.token_ids[rows],
            logprobs={places[row]: found for row, found in self.logprobs.items() if row in places},
            unusable={places[row]: problem for row, problem in self.unusable.items() if row in places},
        )
