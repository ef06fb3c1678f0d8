"""The most likely texts, as far as a beam finds them: `beam_width` beginnings are continued at once.

Each round continues every beam of every prompt by one token: requests of one token, which share their prefixes through
the cache. Of a prompt's candidates, the best tokens of each of its beams, the likeliest go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import numpy as np

from lamella.argument_checks import MOST_TOKENS, RealRange, WholeRange, truth_value
from lamella.engine.outputs import Logprob, RequestOutput
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

MOST_BEAMS = 16_384
_WIDTH = WholeRange(1, MOST_BEAMS, f"at least 1 and at most {MOST_BEAMS} beams")
_TOKENS = WholeRange(1, MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS}")
_TEMPERATURE = RealRange(0.0, 2.0, "0 (the model's own probabilities, as 1) to 2")
_PENALTY = RealRange(-100.0, 100.0, "an exponent from -100 to 100 (0 is off, above 0 prefers longer texts)")

Logprobs = dict[int, Logprob]
Generate = Callable[[list[ParsedPrompt], list[SamplingParams]], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search, with vLLM's names, defaults and meaning.

    beam_width: how many beginnings of a text are continued at once, and how many texts are returned.
    max_tokens: most tokens to generate.
    ignore_eos: go on after the model's end tokens.
    temperature: what the logits are divided by before log-probabilities are added up; 0, as 1, leaves them as they are.
        Any other value has all of the vocabulary looked at, which takes longer.
    length_penalty: texts are ranked by the sum of their tokens' log-probabilities, divided by their length to this
        power. The length counts the prompt, and not an end token.
    """

    beam_width: int
    max_tokens: int
    _: KW_ONLY
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("beam_width", _WIDTH),
            ("max_tokens", _TOKENS),
            ("temperature", _TEMPERATURE),
            ("length_penalty", _PENALTY),
        ):
            object.__setattr__(self, name, allowed.check(name, getattr(self, name), RequestError))
        object.__setattr__(self, "ignore_eos", truth_value("ignore_eos", self.ignore_eos, RequestError))


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One text that was found.

    tokens: prompt and output, with the end token if there is one; text: of all of them, without special tokens.
    logprobs: of each output token, what the search looked at there. cum_logprob: their sum over the output.
    finish_reason: "stop" (an end token) or "length". stop_reason: the end token's id, or None.
    """

    tokens: list[int]
    logprobs: list[Logprobs]
    _: KW_ONLY
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    lora_request: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The texts found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class _Beam:
    """A beginning; parent: the one that it continues, None: it is the prompt."""

    parent: _Beam | None
    token_ids: np.ndarray  # int32, prompt and output
    cum_logprob: float
    logprobs: Logprobs | None  # what its last token was chosen from
    end_token: int | None = None


@dataclass(slots=True, eq=False)
class _Search:
    prompt: ParsedPrompt
    live: list[_Beam]
    ended: list[_Beam]


def search_beams(
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    end_token_ids: Iterable[int],
    generate: Generate,
    vocab_size: int,
    tokenizer: Tokenizer,
) -> Iterator[list[BeamSearchOutput]]:
    """Goes through the rounds; gives what is found so far after each, and after the last what is found. generate: runs
    requests as a batch, and returns their outputs in their order."""
    ends = frozenset(() if params.ignore_eos else end_token_ids)
    searches = [_Search(prompt, [_Beam(None, prompt.token_ids, 0.0, None)], []) for prompt in prompts]
    is_scaled = params.temperature not in (0.0, 1.0)
    most = min(2 * params.beam_width, vocab_size)
    request = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=-1 if is_scaled else most, detokenize=False, ignore_eos=True
    )
    for _ in range(params.max_tokens):
        beams = [(place, beam) for place, search in enumerate(searches) for beam in search.live]
        if not beams:
            break
        asked = [replace(searches[place].prompt, text=None, token_ids=beam.token_ids) for place, beam in beams]
        outputs = generate(asked, [request] * len(asked))
        candidates: list[list[_Beam]] = [[] for _ in searches]
        for (place, beam), output in zip(beams, outputs, strict=True):
            entries = output.outputs[0].logprobs
            if not entries:
                raise RequestError(f"a beam could not be continued: {output.outputs[0].stop_reason}")
            logprobs = _scaled(entries[0], params.temperature, most) if is_scaled else entries[0]
            candidates[place] += [_continued(beam, token_id, logprobs, ends) for token_id in logprobs]
        for search, of_prompt in zip(searches, candidates, strict=True):
            search.ended += [beam for beam in of_prompt if beam.end_token is not None]
            going_on = [beam for beam in of_prompt if beam.end_token is None]
            search.live = sorted(going_on, key=lambda beam: -beam.cum_logprob)[: params.beam_width]
        yield []
    yield [BeamSearchOutput(_best(search, params, tokenizer)) for search in searches]


def _continued(beam: _Beam, token_id: int, logprobs: Logprobs, ends: frozenset[int]) -> _Beam:
    token_ids = np.append(beam.token_ids, np.int32(token_id))
    cum_logprob = beam.cum_logprob + logprobs[token_id].logprob
    return _Beam(beam, token_ids, cum_logprob, logprobs, token_id if token_id in ends else None)


def _scaled(logprobs: Logprobs, temperature: float, most: int) -> Logprobs:
    """The likeliest tokens when the logits of all of them are divided by the temperature."""
    values = np.array([one.logprob for one in logprobs.values()]) / temperature
    values -= values.max() + np.log(np.exp(values - values.max()).sum())
    best = np.argsort(-values, kind="stable")[:most].tolist()
    token_ids = list(logprobs)
    return {token_ids[place]: replace(logprobs[token_ids[place]], logprob=float(values[place])) for place in best}


def _best(search: _Search, params: BeamSearchParams, tokenizer: Tokenizer) -> list[BeamSearchSequence]:
    found = [*search.ended, *search.live]
    found.sort(key=lambda beam: -_score(beam, params.length_penalty))
    return [_sequence(beam, tokenizer) for beam in found[: params.beam_width]]


def _score(beam: _Beam, length_penalty: float) -> float:
    length = len(beam.token_ids) - (beam.end_token is not None)
    return float(beam.cum_logprob / length**length_penalty)


def _sequence(beam: _Beam, tokenizer: Tokenizer) -> BeamSearchSequence:
    logprobs: list[Logprobs] = []
    at: _Beam | None = beam
    while at is not None and at.logprobs is not None:
        logprobs.append(at.logprobs)
        at = at.parent
    tokens = beam.token_ids.tolist()
    return BeamSearchSequence(
        tokens,
        logprobs[::-1],
        cum_logprob=beam.cum_logprob,
        text=tokenizer.decode(tokens),
        finish_reason="length" if beam.end_token is None else "stop",
        stop_reason=beam.end_token,
    )
