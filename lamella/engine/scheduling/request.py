"""One sequence to generate, from arrival to finish."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lamella.engine.scheduling.prompt_scores import PromptScores
from lamella.engine.scheduling.sample_grammar import SampleGrammar
from lamella.engine.scheduling.sampling_settings import SamplingSettings
from lamella.engine.scheduling.token_rules import TokenRules
from lamella.model_executor.step_plan import LogitsFunction, TokenLogprobs

NO_ROW = -1
NO_ADAPTER = 0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it. With n > 1 each of the n samples is a Request of its own.

    token_ids: int32, prompt and output so far; current only while the request is in no row (a running
    request's tokens are in RequestRows).
    eos_token_ids: the model's end tokens; empty where the request ignores them.
    stop_token_ids: further ids that end this request.
    rules: what else it asks of the choice of its tokens; None: nothing.
    grammar: what its output follows; None: nothing. It is this request's alone, too.
    logits_functions: its own functions of the logits. They may have state, which is this request's alone and stays
    whatever happens to its row.
    prompt_scores: of the prompt's own tokens; None: none are wanted.
    adapter_id: the loaded adapter that it runs with.
    prefix_boundaries: positions in the prompt, ascending, where other prompts will part from it.
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
    rules: TokenRules | None = None
    logits_functions: tuple[LogitsFunction, ...] = ()
    grammar: SampleGrammar | None = None
    prompt_scores: PromptScores | None = None
    adapter_id: int = NO_ADAPTER
    prefix_boundaries: tuple[int, ...] = ()
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
    num_draft_tokens: int = 0  # that were verified for it
    num_accepted_tokens: int = 0  # of these, those that it got

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def sought_token_ids(self) -> np.ndarray:
        """Those of its tokens (int32) that the prefix cache is asked for. It leaves at least the last one to compute,
        which is the one behind which a token is to be scored, where there is such a token."""
        scores = self.prompt_scores
        return self.token_ids if scores is None or scores.is_complete else self.token_ids[: scores.first_missing]

    @property
    def banned_before_min_tokens(self) -> tuple[int, ...]:
        return tuple(sorted(self.eos_token_ids | self.stop_token_ids))
