"""What a caller may ask of the generation of one request, with vLLM's names and defaults."""

from __future__ import annotations

import enum
import logging
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.errors import RequestError

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
LOWEST_SAMPLING_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
HIGHEST_PENALTY = 2.0
NUM_SEEDS = 2**64

_ADDED_PENALTIES = ("presence_penalty", "frequency_penalty")


class RequestOutputKind(enum.Enum):
    """What each output of a running request carries."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last output
    FINAL_ONLY = "final_only"  # nothing until the request has finished


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Validated and brought to one form when built; RequestError says what would work.

    n: how many samples of the prompt. Greedy samples are all alike, so n > 1 needs temperature > 0.
    temperature: 0 to 2. Below 1e-5 is greedy: stored as 0.0, and top_p, top_k and min_p are switched
        off. From there to 0.01 it is raised to 0.01, lest the scaled logits overflow.
    top_p: in (0, 1], 1 is off. top_k: 0 or -1 is off, -1 is stored as 0. min_p: in [0, 1], 0 is off.
    presence_penalty: in [-2, 2], 0 is off: taken off the logit of every token in the output.
    frequency_penalty: in [-2, 2], 0 is off: taken off once for each time that the token is in the output.
    repetition_penalty: more than 0, 1 is off: positive logits of tokens in prompt or output are divided by it, the
        others multiplied. Penalties hold for greedy requests too.
    seed: 0 to 2**64 - 1; None or -1 (stored as None) lets the engine choose.
    stop: strings that end the generation: one string, several, or None; stored as a tuple without
        repetitions. They are searched in the text, so they need detokenize=True.
    stop_token_ids: token ids that end the generation, stored the same way.
    ignore_eos: go on after the model's end tokens.
    max_tokens: most tokens to generate; None goes on until the engine's max_model_len.
    min_tokens: end tokens and stop token ids are not sampled, and stop strings not heeded, before so
        many tokens exist.
    logprobs: None for none, else how many of the most likely tokens to report besides the sampled one.
    detokenize: False leaves every text empty.
    include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
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

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        """Bring every field to its own type (numpy scalars to Python's), or refuse it."""
        for name in ("n", "top_k", "min_tokens"):
            self._set(**{name: _integer(name, getattr(self, name))})
        for name in ("seed", "max_tokens", "logprobs"):
            value = getattr(self, name)
            self._set(**{name: None if value is None else _integer(name, value)})
        for name in ("temperature", "top_p", "min_p", *_ADDED_PENALTIES, "repetition_penalty"):
            self._set(**{name: _real(name, getattr(self, name))})
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise RequestError(f"{name}={value!r} is not a truth value; give True or False")
            self._set(**{name: bool(value)})
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind={self.output_kind!r} is no RequestOutputKind; give RequestOutputKind.CUMULATIVE, "
                "RequestOutputKind.DELTA or RequestOutputKind.FINAL_ONLY"
            )
        self._set(stop=_stop_strings(self.stop), stop_token_ids=_stop_token_ids(self.stop_token_ids))

    def _check_ranges(self) -> None:
        if self.n < 1:
            raise RequestError(f"n={self.n} asks for no sample; give at least 1")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= HIGHEST_TEMPERATURE):
            raise RequestError(
                f"temperature={self.temperature} is out of range; give 0 (greedy) to {HIGHEST_TEMPERATURE:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p={self.top_p} keeps no meaningful set; give more than 0 and at most 1 (1 is off)")
        if self.top_k < -1:
            raise RequestError(f"top_k={self.top_k} is negative; give at least 1, or 0 or -1 to switch it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p={self.min_p} is no fraction of the highest probability; give 0 (off) to 1")
        for name in _ADDED_PENALTIES:
            if not -HIGHEST_PENALTY <= getattr(self, name) <= HIGHEST_PENALTY:
                raise RequestError(
                    f"{name}={getattr(self, name)} is out of range; give {-HIGHEST_PENALTY:g} to {HIGHEST_PENALTY:g} "
                    "(0 is off)"
                )
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise RequestError(
                f"repetition_penalty={self.repetition_penalty} is no factor to divide by; give more than 0 (1 is off)"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                f"max_tokens={self.max_tokens} generates nothing; give at least 1, or None to go on until max_model_len"
            )
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens={self.min_tokens} is negative; give 0 (off) or more")
        if self.logprobs is not None and self.logprobs < 0:
            raise RequestError(
                f"logprobs={self.logprobs} is negative; give None for none, or how many top tokens to report (0 up)"
            )
        if self.seed is not None and not -1 <= self.seed < NUM_SEEDS:
            raise RequestError(
                f"seed={self.seed} does not fit 64 bits; give 0 to 2**64 - 1, or None to let the engine choose"
            )
        self._set(top_k=max(self.top_k, 0), seed=None if self.seed == -1 else self.seed)

    def _check_contradictions(self) -> None:
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
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={list(self.stop)!r} is searched in the text, which detokenize=False never makes; set "
                "detokenize=True or use stop_token_ids"
            )


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name}={value!r} is a {type(value).__name__}; give an integer")
    return int(value)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name}={value!r} is a {type(value).__name__}; give a number")
    return float(value)


def _stop_strings(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(f"stop={given!r} is a {type(given).__name__}; give a string or a list of strings")
    strings = tuple(given)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop={list(strings)!r} holds a {type(string).__name__}; give strings only")
        if not string:
            raise RequestError(f"stop={list(strings)!r} holds an empty string, which would match at once; leave it out")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise RequestError(f"stop_token_ids={given!r} is a {type(given).__name__}; give a list of token ids")
    token_ids = tuple(_integer("stop_token_ids", token_id) for token_id in given)
    for token_id in token_ids:
        if token_id < 0:
            raise RequestError(f"stop_token_ids={list(token_ids)!r} holds a negative id; give ids of the vocabulary")
    return tuple(dict.fromkeys(token_ids))
