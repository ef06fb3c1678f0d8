"""What a caller may ask of the generation of one request, with vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lamella.argument_checks import MOST_SEED, MOST_TOKENS, RealRange, WholeRange, shown, truth_value
from lamella.engine import sampling_values
from lamella.engine.logits_processors import LogitsProcessor, checked_processors
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.vllm_keywords import takes_vllm_keywords
from lamella.engine.vllm_request_arguments import SAMPLING_ARGUMENTS
from lamella.errors import RequestError

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
LOWEST_SAMPLING_TEMPERATURE = 0.01
# vLLM's limit: each sample is a request of its own, whose memory is taken when it is added.
MOST_SAMPLES = 16_384
_PENALTY = RealRange(-2.0, 2.0, "-2 to 2 (0 is off)")

_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_start")
WHOLE_NUMBERS = {
    "n": WholeRange(1, MOST_SAMPLES, f"at least 1 and at most {MOST_SAMPLES} samples"),
    "top_k": WholeRange(-1, MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS}, or 0 or -1 to switch it off"),
    "seed": WholeRange(-1, MOST_SEED, "0 to 2**64 - 1, or None to let the engine choose"),
    "max_tokens": WholeRange(
        1, MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS}, or None to go on until max_model_len"
    ),
    "min_tokens": WholeRange(0, MOST_TOKENS, f"0 (off) or more, at most {MOST_TOKENS}"),
    "logprobs": WholeRange(
        -1, MOST_TOKENS, "None for none, or how many top tokens to report (0 up; -1 for the whole vocabulary)"
    ),
    "prompt_logprobs": WholeRange(
        -1,
        MOST_TOKENS,
        "None for none, or how many top tokens to report for each of the prompt's (0 up; -1 for the whole vocabulary)",
    ),
    "prompt_logprob_start": WholeRange(0, MOST_TOKENS, f"a position in the prompt, from 0, at most {MOST_TOKENS}"),
    "no_repeat_ngram_size": WholeRange(0, MOST_TOKENS, f"0 (off) or more, at most {MOST_TOKENS}"),
}
REAL_NUMBERS = {
    "temperature": RealRange(0.0, 2.0, "0 (greedy) to 2"),
    "top_p": RealRange(0.0, 1.0, "more than 0 and at most 1 (1 is off)", leaves_out_least=True),
    "min_p": RealRange(0.0, 1.0, "0 (off) to 1, a fraction of the highest probability"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    # Beyond this, a logit multiplied with it or divided by it may be too large for float32.
    "repetition_penalty": RealRange(1e-6, 1e6, "a factor of more than 0, from 1e-6 to 1e6 (1 is off)"),
}


class RequestOutputKind(enum.Enum):
    """What each output of a running request carries."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last output
    FINAL_ONLY = "final_only"  # nothing until the request has finished


@takes_vllm_keywords(SAMPLING_ARGUMENTS, RequestError)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Validated and brought to one form when built; RequestError says what would work.

    All but n are given by name. vLLM's parameters that lamella has not are taken where they ask for nothing.

    n: how many outputs for each prompt, 1 to 16384. Greedy samples are all alike, so n > 1 needs temperature > 0.
    temperature: how freely to choose, 0 to 2; 0 always takes the most likely token (greedy). Below 1e-5 is greedy:
        stored as 0.0, and top_p, top_k and min_p are switched off. From there to 0.01 it is raised to 0.01, lest the
        scaled logits overflow.
    top_p: choose among the most likely tokens that together have this share of the probability; in (0, 1], 1 is off.
    top_k: choose among so many of the most likely tokens; 0 is off. So is -1, stored as 0, and the size of the
        vocabulary or more: all of it.
    min_p: leave out tokens of less than this share of the highest probability; in [0, 1], 0 is off.
    presence_penalty: makes tokens that are in the output less likely (above 0) or more likely (below 0); -2 to 2, 0 is
        off. It is taken off their logits.
    frequency_penalty: the same, for each time that the token is in the output; -2 to 2, 0 is off.
    repetition_penalty: makes tokens that are in the prompt or the output less likely (above 1) or more likely (below
        1); 1e-6 to 1e6, 1 is off. Positive logits are divided by it, the others multiplied. Penalties hold for greedy
        requests too.
    seed: number that makes the same choices again, 0 to 2**64 - 1; None: the engine chooses one. And -1, which is
        stored as None.
    structured_outputs: a form that the output has: JSON by a schema, a regular expression, one of several choices, a
        grammar, or tags in free text. An end token comes once the form is complete, so
        ignore_eos must be False; an output that max_tokens or a stop cuts off is not complete.
    stop: text that ends the output. One string, several, or None; stored as a tuple without repetitions. It is
        searched in the text, so it needs detokenize=True.
    stop_token_ids: token ids that end the output. Stored the same way.
    ignore_eos: go on after the model's end tokens.
    max_tokens: most tokens to generate, 1 up; None: as long as the engine allows.
    min_tokens: fewest tokens to generate. Before so many exist, end tokens and stop token ids are not sampled, and stop
        strings not heeded.
    logprobs: how many of the most likely tokens to report with their log-probabilities, besides the sampled one; -1:
        the whole vocabulary; None: no log-probabilities. They are those of the model's own logits, before anything here
        changes them.
    prompt_logprobs: how many of the most likely tokens to report for each of the prompt's, with their
        log-probabilities and the prompt token's own. -1: the whole vocabulary. The prompt's first token has none.
        Positions whose log-probabilities are wanted are computed anew even where the prefix cache has them.
    prompt_logprob_start: the first position of the prompt to report of; those before may come from the cache. None is
        stored as 0.
    logit_bias: what is added to the logits of tokens, {token id: number}. Stored as a tuple of pairs.
    allowed_token_ids: the only tokens that may be generated; None: all.
    bad_words: text that is not to be generated. Of the tokens of each, with and without a space before it, the last is
        not generated where the output ends with the others. Stored as a tuple.
    bad_words_ids: lists of token ids that are not to be generated, the prompt counted in. transformers' name, and
        result.
    no_repeat_ngram_size: no sequence of so many tokens comes twice in prompt and output; 0 is off. transformers' name,
        and result.
    suppress_tokens: token ids that are never generated.
    begin_suppress_tokens: token ids that are not generated as the first of the output.
    logits_processors: functions of (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits): two
        sequences that are like tuples, and float32 [vocab], which they may overwrite. Each returns the logits for the
        next. A class (or functools.partial of one) is made for each sample, and so may have state, which stays when a
        sample is preempted; after a step that failed, and before tokens that are only guessed, it may be called for one
        position again. One that raises, or returns anything else, ends its request with finish_reason "error".
        These parameters change logits in this order: what may not come (allowed_token_ids, bad_words, min_tokens and
        the others) gets -inf; logit_bias is added; logits_processors, which cannot bring back what may not come;
        penalties. They hold for greedy requests too.
    detokenize: turn tokens into text. False leaves every text empty.
    skip_special_tokens: leave special tokens out of the text.
    include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
    output_kind: what each output of a running request carries.
    """

    n: int = 1
    _: KW_ONLY
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    no_repeat_ngram_size: int = 0
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_values()
        self._check_contradictions()
        if self.is_greedy:
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < LOWEST_SAMPLING_TEMPERATURE:
            logger.warning(
                "temperature=%g is so low that scaled logits may overflow; using %g (0 is greedy)",
                self.temperature,
                LOWEST_SAMPLING_TEMPERATURE,
            )
            self._set(temperature=LOWEST_SAMPLING_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the logits of tokens depend on how often they occurred."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def has_token_rules(self) -> bool:
        """Whether anything beside penalties, min_tokens and logits_processors changes logits."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.bad_words_ids
            or self.no_repeat_ngram_size
            or self.suppress_tokens
            or self.begin_suppress_tokens
        )

    def clone(self) -> SamplingParams:
        """An equal value of its own. `dataclasses.replace(params, max_tokens=5)` is one with a change."""
        return dataclasses.replace(self)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        """Bring every field to its own type (numpy scalars to Python's) and check its range, or refuse it."""
        for name, whole in WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                self._set(**{name: whole.check(name, value, RequestError)})
        for name, real in REAL_NUMBERS.items():
            self._set(**{name: real.check(name, getattr(self, name), RequestError)})
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            self._set(**{name: truth_value(name, getattr(self, name), RequestError)})
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind={shown(self.output_kind)} is no RequestOutputKind; give RequestOutputKind.CUMULATIVE, "
                "RequestOutputKind.DELTA or RequestOutputKind.FINAL_ONLY"
            )
        self._set(
            stop=sampling_values.stop_strings(self.stop),
            stop_token_ids=sampling_values.token_ids("stop_token_ids", self.stop_token_ids),
            logit_bias=sampling_values.logit_bias(self.logit_bias),
            allowed_token_ids=sampling_values.allowed_token_ids(self.allowed_token_ids),
            bad_words=sampling_values.bad_words(self.bad_words),
            bad_words_ids=sampling_values.token_sequences("bad_words_ids", self.bad_words_ids),
            suppress_tokens=sampling_values.token_ids("suppress_tokens", self.suppress_tokens),
            begin_suppress_tokens=sampling_values.token_ids("begin_suppress_tokens", self.begin_suppress_tokens),
            structured_outputs=StructuredOutputsParams.of(self.structured_outputs),
            logits_processors=checked_processors(self.logits_processors),
            top_k=max(self.top_k, 0),
            seed=None if self.seed == -1 else self.seed,
            prompt_logprob_start=self.prompt_logprob_start or 0,
        )

    def _check_contradictions(self) -> None:
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos=True with structured_outputs: an output whose form is complete can only end; leave one out"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens or lower "
                "min_tokens"
            )
        if self.is_greedy and self.n > 1:
            raise RequestError(
                f"n={self.n} with temperature={self.temperature:g} would give {self.n} equal greedy samples; give n=1 "
                "or a temperature of 0.01 or more"
            )
        if self.prompt_logprob_start and self.prompt_logprobs is None:
            raise RequestError(
                f"prompt_logprob_start={self.prompt_logprob_start} says where prompt_logprobs begin, which are not "
                "asked for; set prompt_logprobs, or leave it at 0"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={shown(list(self.stop))} is searched in the text, which detokenize=False never makes; set "
                "detokenize=True or use stop_token_ids"
            )
