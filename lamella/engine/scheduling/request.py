"""One sequence to generate, from arrival to finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lamella.engine.scheduling.sampling_settings import SamplingSettings
from lamella.model_executor.step_plan import TokenLogprobs

NO_ROW = -1


class DraftGrammar(Protocol):
    """What the output of a request must obey, as far as drafts are concerned."""

    def allowed_prefix(self, token_ids: list[int]) -> list[int]:
        """The first of these tokens, as many as may come in this order after the request's output so far, all of it.
        Changes nothing."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it. With n > 1 each of the n samples is a Request of its own.

    token_ids: int32, prompt and output so far; current only while the request is in no row (a running
    request's tokens are in RequestRows).
    eos_token_ids: the model's end tokens; empty where the request ignores them.
    stop_token_ids: further ids that end this request.
    """

    request_id: str
    sample_index: int
    params: SamplingSettings
    token_ids: np.ndarray
    num_prompt_tokens: int
    max_total_tokens: int
    seed: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    arrival_time: float
    salt: str | None = None
    row: int = NO_ROW
    num_cached_tokens: int | None = None  # prompt tokens served from the cache when it first ran
    admission_index: int = -1  # how many requests first ran before it; -1 until it does
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_long: bool = False  # see LongTexts
    grammar: DraftGrammar | None = None
    num_draft_tokens: int = 0  # that were verified for it
    num_accepted_tokens: int = 0  # of these, those that it got

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def banned_before_min_tokens(self) -> tuple[int, ...]:
        return tuple(sorted(self.eos_token_ids | self.stop_token_ids))
