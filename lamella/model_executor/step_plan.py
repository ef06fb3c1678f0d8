"""What one step runs. The scheduler makes it, the runner takes it; neither reaches into the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from lamella.errors import InvariantError
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.step_memory import GroupPlan, TableVersions

if TYPE_CHECKING:
    import torch

Entry = TypeVar("Entry")
# Takes the tokens of the prompt, those of the output so far, and logits float32 [vocab] that it may write to; returns
# the logits to sample from.
LogitsFunction = Callable[[Sequence[int], Sequence[int], "torch.Tensor"], "torch.Tensor"]


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


class TokenBiases(NamedTuple):
    """What is added to the logits of some tokens, each once."""

    token_ids: np.ndarray  # int64 [n]
    values: np.ndarray  # float32 [n], finite


@dataclass(frozen=True, slots=True)
class RowProcessors:
    """A request's own functions of its logits, in the order in which they are called, and the tokens to call them
    with. What one of them raises, or returns that is no row of logits, ends that request alone."""

    functions: tuple[LogitsFunction, ...]
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample the token after each of the `S` positions that need one: a row each, in StepPlan's order.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off. A draw depends on (seed, draw_index)
    alone: draw_index is how many tokens of the request's output come before the one that is drawn.
    num_logprobs[i]: -1 for none, else how many top log-probabilities to return besides the
    sampled token's own.

    The others have an entry for the rows alone that ask for it:
    banned_token_ids[i]: ids that row i may not produce, in any order (end tokens before min_tokens; bad words).
    penalties[i], biases[i], processors[i]: of row i.
    masks[i]: uint32 [ceil(vocab / 32)], what row i may produce: the token with id t if bit t % 32 of word t // 32 is
    set, 0 being the lowest. Not to be written once a batch has it.
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
    biases: dict[int, TokenBiases] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    processors: dict[int, RowProcessors] = field(default_factory=dict)

    @property
    def edited_rows(self) -> list[int]:
        """The rows whose logits are changed before a token is chosen, ascending."""
        return sorted({*self.edited_rows_beside_masks, *self.masks})

    @property
    def edited_rows_beside_masks(self) -> list[int]:
        """The same, for other reasons than a mask, in any order."""
        return [*self.banned_token_ids, *self.penalties, *self.biases, *self.processors]

    def part(self, rows: np.ndarray) -> SamplingBatch:
        """The same for these of the S rows alone (int64, none twice), in this order."""
        places = {row: place for place, row in enumerate(rows.tolist())}

        def of(entries: dict[int, Entry]) -> dict[int, Entry]:
            return {places[row]: entry for row, entry in entries.items() if row in places}

        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seeds[rows],
            draw_index=self.draw_index[rows],
            num_logprobs=self.num_logprobs[rows],
            banned_token_ids=of(self.banned_token_ids),
            penalties=of(self.penalties),
            biases=of(self.biases),
            masks=of(self.masks),
            processors=of(self.processors),
        )


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens that are known, of which a step is to say how likely they were: log-probabilities of prompts.

    Behind each of `tokens` comes the token `target_ids`, and its log-probability is wanted, with those of the
    num_logprobs most likely ones. rows, positions: whose token it is, and where; the planner's alone.
    """

    tokens: np.ndarray  # int64 [K], which of the T tokens, ascending within each request
    rows: np.ndarray  # int64 [K]
    positions: np.ndarray  # int64 [K], of the target
    target_ids: np.ndarray  # int64 [K]
    num_logprobs: np.ndarray  # int64 [K], 0 or more


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A ragged batch: R requests, T new tokens, S tokens to sample.

    Requests with one new token whose context is complete come first (`num_decodes` of them).
    num_sampled counts from a request's end: behind each of its last num_sampled new tokens one is sampled. 0 is a chunk
    that does not end its prompt, 1 the usual step; k + 1 verifies a draft of k tokens, which are the last new ones. The
    S samples are those of the first request, in the order of their positions, then those of the second, and so on.
    The arrays are the planner's too: whoever runs the step only reads them, and is done with them when the second
    plan after this one is made.

    Raises InvariantError where num_sampled is negative or more than a request's new tokens.
    """

    token_ids: np.ndarray  # int64 [T]; without meaning where token_sources names a sample
    positions: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int64 [R + 1]
    seq_lens: np.ndarray  # int64 [R]
    num_decodes: int
    moves: tuple[PageMoves, ...]  # in this order: a page may move on, and its place be used again
    groups: tuple[GroupPlan, ...]
    first_step_slot: int  # slots from here on lie in step pages: what they hold is for this step alone
    num_sampled: np.ndarray  # int64 [R], how many of each request's last new tokens are followed by a sampled one
    sampling: SamplingBatch
    # int64 [T]: which of the S samples of the step launched before is the token; -1: it is in token_ids. None: all are.
    token_sources: np.ndarray | None = None
    # bool [R]: whose texts take the rotary embedding of long ones, where a model has two. None: none do.
    is_long_text: np.ndarray | None = None
    scored: ScoredTokens | None = None
    # int64 [R]: each request's adapter, by its number in the runner; 0: it has none. None: no request has one.
    adapter_ids: np.ndarray | None = None
    # None: no block manager made the plan. Request i's tables are row i's, and nothing is known of what was there.
    tables: TableVersions | None = None

    def __post_init__(self) -> None:
        num_sampled, num_new = self.num_sampled, self.query_start[1:] - self.query_start[:-1]
        if num_sampled.shape != num_new.shape:
            raise InvariantError(
                f"num_sampled has shape {list(num_sampled.shape)}; {len(num_new)} requests take [{len(num_new)}]"
            )
        # One comparison for both ends: a negative number is a huge one without a sign.
        if np.count_nonzero(num_sampled.view(np.uint64) > num_new.view(np.uint64)):
            raise InvariantError(
                f"num_sampled is {num_sampled.tolist()} for requests of {num_new.tolist()} new tokens; each must lie "
                "between 0 and the request's"
            )

    @property
    def num_samples(self) -> int:
        """S."""
        return int(self.num_sampled.sum())

    @property
    def sample_requests(self) -> np.ndarray:
        """int64 [S], which of the R requests each sample is of."""
        return np.repeat(np.arange(len(self.num_sampled)), self.num_sampled)

    @property
    def sampled_tokens(self) -> np.ndarray:
        """int64 [S], ascending: which of the T tokens are followed by one that is sampled."""
        # Of all samples up to the end of a sample's request, how many come behind it or are it.
        requests = self.sample_requests
        num_left = np.cumsum(self.num_sampled)[requests] - np.arange(len(requests))
        tokens: np.ndarray = self.query_start[1:][requests] - num_left
        return tokens

    @property
    def output_tokens(self) -> np.ndarray:
        """int64, ascending: which of the T tokens' logits are needed, to sample or to score."""
        if self.scored is None:
            return self.sampled_tokens
        return np.union1d(self.sampled_tokens, self.scored.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, sampled or given: its own and the `k` most likely ids with theirs."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: np.ndarray  # int64 [k]
    top_logprobs: np.ndarray  # float32 [k]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The S sampled tokens, a row each, in the order of StepPlan.sampled_tokens.

    unusable: row of the S -> why no token could be chosen; its token_ids entry is some id of the vocabulary.
    scored: of each of the plan's ScoredTokens.
    """

    token_ids: np.ndarray  # int64 [S]
    logprobs: dict[int, TokenLogprobs]  # row of the S -> its log-probabilities, where asked for
    unusable: dict[int, str] = field(default_factory=dict)
    scored: Sequence[TokenLogprobs] = ()

    def part(self, rows: np.ndarray) -> StepResult:
        """The result of these of the S rows alone (int64, none twice), in this order, with all that is scored."""
        places = {row: place for place, row in enumerate(rows.tolist())}
        return StepResult(
            token_ids=self.token_ids[rows],
            logprobs={places[row]: found for row, found in self.logprobs.items() if row in places},
            unusable={places[row]: problem for row, problem in self.unusable.items() if row in places},
            scored=self.scored,
        )
