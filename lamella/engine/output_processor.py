"""From sampled tokens to what the user sees: text, stop strings, RequestOutputs.

What is *kept* of each request (its tokens, how it ended, what was given out) is the truth, and all else can be made
anew from it. First, everything that follows from a step's tokens is computed; until that is done, the tokens can be
undone. Then all of it is kept at once. What remains after that only stores results, and is simply done again if it was
interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lamella.engine.detokenizer import IncrementalDetokenizer
from lamella.engine.lora_request import LoRARequest
from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.scheduling.new_tokens import NewTokens
from lamella.engine.scheduling.request import NO_ROW, Request
from lamella.engine.step_failures import ENDED, Position
from lamella.errors import LamellaError
from lamella.model_executor.step_plan import TokenLogprobs
from lamella.model_executor.text.stop_strings import StopStrings
from lamella.model_executor.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What is kept of a sample: number of tokens, number of tokens reported, finish_reason, stop_reason.
_Kept = tuple[int, int, str | None, int | str | None]


@dataclass(slots=True, eq=False)
class _Sample:
    """One of the n samples of a user's request."""

    request: Request
    detokenizer: IncrementalDetokenizer | None = None  # None: to be made from the tokens when it is needed
    token_ids: list[int] = field(default_factory=list)
    num_reported: int = 0  # tokens in earlier DELTA outputs
    cumulative_logprob: float = 0.0  # of the tokens in `logprobs`
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of tokens in earlier outputs
    kept: _Kept = (0, 0, None, None)

    def keep(self) -> None:
        request = self.request
        self.kept = (len(self.token_ids), self.num_reported, request.finish_reason, request.stop_reason)

    def restore(self) -> None:
        """Go back to what was kept, also in the request, whose token_ids count while it is in no row."""
        request = self.request
        num_tokens, self.num_reported, request.finish_reason, request.stop_reason = self.kept
        del self.token_ids[num_tokens:]
        del request.output_logprobs[num_tokens:]
        del self.logprobs[num_tokens:]
        self.cumulative_logprob = sum((entry.logprob for entry in request.output_logprobs[: len(self.logprobs)]), 0.0)
        output_ids = np.array(self.token_ids, dtype=np.int32)
        request.token_ids = np.concatenate([request.token_ids[: request.num_prompt_tokens], output_ids])


@dataclass(slots=True, eq=False)
class Conversation:
    """A user's request: its samples and what does not change between outputs."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stops: StopStrings | None  # those of `params`, prepared
    samples: list[_Sample]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # once they are complete
    lora_request: LoRARequest | None = None

    @property
    def request_id(self) -> str:
        return self.samples[0].request.request_id

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self.samples]

    @property
    def is_finished(self) -> bool:
        return all(sample.request.is_finished for sample in self.samples)


class _Finding(NamedTuple):
    """All results of a step or an abort. Once this value exists, the step counts as taken in."""

    samples: list[_Sample]
    finished_ids: list[str]
    outputs: list[RequestOutput]
    num_kept_tokens: int


class Stopped(NamedTuple):
    """A request that a stop string ended. num_dropped_tokens: how many tokens the step gave it behind that."""

    request: Request
    stop_string: str
    num_dropped_tokens: int


class EndedSample(NamedTuple):
    """A sample that has ended, and how many tokens it got."""

    request: Request
    num_output_tokens: int


class OutputProcessor:
    """num_kept_tokens: how many generated tokens of all requests have been kept since the start. ended: the samples
    that the last call of `process`, `abort` or `fail` ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._conversations: dict[str, Conversation] = {}
        self._last_stops: StopStrings | None = None  # often the next request has the same
        self._outputs: list[RequestOutput] = []  # those that are due and that nobody has taken yet
        self._finding: _Finding | None = None
        self._is_open = False  # whether something may have changed that is not kept yet
        self.num_kept_tokens = 0
        self.ended: list[EndedSample] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._conversations

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def has_outputs(self) -> bool:
        """Whether there are outputs that nobody has taken."""
        return bool(self._outputs)

    def new_conversation(
        self,
        prompt: str | None,
        params: SamplingParams,
        requests: list[Request],
        lora_request: LoRARequest | None = None,
    ) -> Conversation:
        stops = self._prepare_stops(params)
        ids = requests[0].token_ids[: requests[0].num_prompt_tokens].tolist()
        return Conversation(
            prompt, ids, params, stops, [_Sample(request) for request in requests], lora_request=lora_request
        )

    def add(self, conversation: Conversation) -> None:
        self._conversations[conversation.request_id] = conversation

    def unfinished(self) -> Iterator[Request]:
        """The requests that have not finished, in order of arrival."""
        for conversation in self._conversations.values():
            for sample in conversation.samples:
                if not sample.request.is_finished:
                    yield sample.request

    def _prepare_stops(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self._last_stops is None or self._last_stops.given != params.stop:
            self._last_stops = StopStrings(params.stop)
        return self._last_stops

    def _ended(self, request: Request) -> EndedSample:
        sample = self._conversations[request.request_id].samples[request.sample_index]
        return EndedSample(request, len(sample.token_ids))

    def requests_of(self, request_id: str) -> list[Request]:
        return self._conversations[request_id].requests

    def process(self, new_tokens: NewTokens) -> list[Stopped]:
        """Take in a step's tokens; `take` has the outputs that are due then.

        Returns the requests that a stop string ended: the caller has the scheduler finish those.
        """
        self._is_open = True
        stopped: list[Stopped] = []
        touched: dict[str, Conversation] = {}
        samples: list[_Sample] = []
        num_dropped, cut = 0, None
        for request, token_id, is_last in new_tokens.each():
            if request is cut:  # a stop string ended it before this token
                stopped[-1] = stopped[-1]._replace(num_dropped_tokens=stopped[-1].num_dropped_tokens + 1)
                num_dropped += 1
                continue
            conversation = self._conversations[request.request_id]
            sample = conversation.samples[request.sample_index]
            detokenizer = sample.detokenizer or self._detokenizer(conversation, sample)
            sample.token_ids.append(token_id)
            samples.append(sample)
            touched[request.request_id] = conversation
            # The text of an end token is no output, unless asked for.
            is_end = is_last and request.finish_reason == "stop"
            stop_string = detokenizer.append(token_id, is_stop_token=is_end)
            if stop_string is not None:
                request.finish_reason, request.stop_reason = "stop", stop_string
                del request.output_logprobs[len(sample.token_ids) :]
                stopped.append(Stopped(request, stop_string, 0))
                cut = request
            if stop_string is not None or (is_last and request.is_finished):
                detokenizer.finish()
        for request in new_tokens.failed:
            conversation = self._conversations[request.request_id]
            sample = conversation.samples[request.sample_index]
            (sample.detokenizer or self._detokenizer(conversation, sample)).finish()
            samples.append(sample)
            touched[request.request_id] = conversation
        ended = dict.fromkeys((*new_tokens.ended, *new_tokens.failed, *(one.request for one in stopped)))
        found = [self._ended(request) for request in ended]
        self._keep(samples, touched.values(), len(new_tokens.token_ids) - num_dropped)
        self.ended = found
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End these requests, and forget them; `take` has their last outputs then. Returns those that were not
        finished, which the caller has the scheduler finish."""
        self._is_open = True
        touched = [self._conversations[request_id] for request_id in request_ids]
        samples = [(conversation, sample) for conversation in touched for sample in conversation.samples]
        ended = [sample.request for _, sample in samples if not sample.request.is_finished]
        for conversation, sample in samples:
            (sample.detokenizer or self._detokenizer(conversation, sample)).finish()
        for request in ended:
            request.finish_reason, request.stop_reason = "abort", None
        found = [self._ended(request) for request in ended]
        self._keep([sample for _, sample in samples], touched, 0)
        self.ended = found
        return ended

    def fail(self, errors: Mapping[str, LamellaError]) -> list[Request]:
        """As `abort`, for requests whose steps fail: `take` has an output with the error for each. What cannot be told
        of it, because making it fails, too, is left out."""
        self._is_open = True
        samples: list[_Sample] = []
        ended: list[Request] = []
        outputs: list[RequestOutput] = []
        for request_id, error in errors.items():
            conversation = self._conversations[request_id]
            for sample in conversation.samples:
                if not sample.request.is_finished:
                    sample.request.finish_reason, sample.request.stop_reason = "error", str(error)
                    ended.append(sample.request)
            try:
                for sample in conversation.samples:
                    (sample.detokenizer or self._detokenizer(conversation, sample)).finish()
                output = self._output(conversation, final=True)
            except Exception:
                logger.warning("of request %s only the tokens can be told", request_id, exc_info=True)
                output = self._bare_output(conversation)
            outputs.append(dataclasses.replace(output, error=error))
            samples += conversation.samples
        found = [self._ended(request) for request in ended]
        self._finding = _Finding(samples, list(errors), outputs, self.num_kept_tokens)
        self._finish_finding()
        self.ended = found
        return ended

    def _bare_output(self, conversation: Conversation) -> RequestOutput:
        """A last output that nothing has to be computed for: the tokens that are kept."""
        is_delta = conversation.params.output_kind is RequestOutputKind.DELTA
        parts = []
        for sample in conversation.samples:
            num_tokens, num_reported, *_ = sample.kept
            token_ids = sample.token_ids[num_reported if is_delta else 0 : num_tokens]
            request = sample.request
            parts.append(
                CompletionOutput(
                    index=request.sample_index,
                    text="",
                    token_ids=token_ids,
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                )
            )
        return RequestOutput(
            request_id=conversation.request_id,
            prompt=conversation.prompt,
            prompt_token_ids=conversation.prompt_token_ids,
            outputs=parts,
            finished=True,
            lora_request=conversation.lora_request,
        )

    def positions_of(self, request_id: str, num_computed: Sequence[int]) -> tuple[Position, ...] | None:
        """How far each of the request's samples has come; None: the request has ended. Of one that waits, what it has
        computed of its prompt alone does not count.

        num_computed: by row."""
        conversation = self._conversations.get(request_id)
        if conversation is None:
            return None
        positions = []
        for sample in conversation.samples:
            num_tokens, _, finish_reason, _ = sample.kept
            row = sample.request.row
            if finish_reason is not None:
                positions.append(ENDED)
            elif row != NO_ROW:
                positions.append(Position(num_computed[row], num_tokens))
            else:
                computed = sample.request.num_prompt_tokens + num_tokens - 1 if num_tokens else 0
                positions.append(Position(computed, num_tokens))
        return tuple(positions)

    def in_a_step(self) -> list[str]:
        """The ids of the requests that run, or that have ended with what is not kept yet. For a failed step, before it
        is undone."""
        return [
            request_id
            for request_id, conversation in self._conversations.items()
            if any(
                sample.request.row != NO_ROW or (sample.request.is_finished and sample.kept[2] is None)
                for sample in conversation.samples
            )
        ]

    def ids(self) -> list[str]:
        """Of the requests that have not ended, in order of arrival."""
        return list(self._conversations)

    # Outputs must not be lost when the call that takes them is interrupted. So they are forgotten last, on the line
    # that returns them, and nothing is called after it. Python changes threads and runs signal handlers at the
    # beginning of a call, so neither can happen within `_swap` and `_replace`.

    def take(self) -> list[RequestOutput]:
        """The outputs that are due; each is returned once. Any thread may call this at any time."""
        return self._swap([])

    def take_of(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """As `take`, but only the outputs of these requests."""
        wanted, before = set(request_ids), self._outputs
        taken = [output for output in before if output.request_id in wanted]
        left = [output for output in before if output.request_id not in wanted]
        return taken if self._replace(before, left) else self.take_of(wanted)

    def _swap(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        before, self._outputs = self._outputs, outputs
        return before

    def _replace(self, before: list[RequestOutput], outputs: list[RequestOutput]) -> bool:
        """Put `outputs` in the place of `before`. False, and nothing changed, where outputs came or were taken
        meanwhile."""
        if self._outputs is not before:
            return False
        self._outputs = outputs
        return True

    def settle(self, *, restores: bool) -> None:
        """After an exception: finish storing the results of a step, if there are any; else go back to what is kept.

        restores: let all requests go back to what is then kept in either case, because they may have tokens that were
        not processed, or rows that they are not in. If this is interrupted, it must be called again before anything
        else."""
        self._finish_finding()
        if self._is_open or restores:
            for conversation in self._conversations.values():
                for sample in conversation.samples:
                    if self._is_open:
                        sample.detokenizer = None
                    sample.restore()
            self._is_open = False

    def clear(self) -> None:
        self._conversations.clear()
        self._outputs = []
        self._finding = None
        self._is_open = False

    def _keep(self, samples: list[_Sample], touched: Iterable[Conversation], num_new_tokens: int) -> None:
        """Compute what the outputs are, then keep all results of the step at once."""
        outputs: list[RequestOutput] = []
        finished_ids: list[str] = []
        for conversation in touched:
            is_finished = conversation.is_finished
            if is_finished:
                finished_ids.append(conversation.request_id)
            if is_finished or conversation.params.output_kind != RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(conversation, final=is_finished))
                samples += conversation.samples if len(conversation.samples) > 1 else ()
        self._finding = _Finding(samples, finished_ids, outputs, self.num_kept_tokens + num_new_tokens)
        self._finish_finding()

    def _finish_finding(self) -> None:
        """Store what was found. After an interrupt it runs again, so each line must bear being repeated."""
        finding = self._finding
        if finding is None:
            return
        for sample in finding.samples:
            sample.keep()
        for request_id in finding.finished_ids:
            self._conversations.pop(request_id, None)
        is_given = not finding.outputs
        while not is_given:
            before = self._outputs
            is_given = any(one is finding.outputs[0] for one in before) or self._replace(
                before, [*before, *finding.outputs]
            )
        self.num_kept_tokens = finding.num_kept_tokens
        self._is_open = False
        self._finding = None

    def _detokenizer(self, conversation: Conversation, sample: _Sample) -> IncrementalDetokenizer:
        """The sample's detokenizer, made anew from the tokens that are kept."""
        detokenizer = IncrementalDetokenizer(self._tokenizer, conversation.params, conversation.stops)
        is_delta = conversation.params.output_kind is RequestOutputKind.DELTA
        num_tokens, _, finish_reason, stop_reason = sample.kept
        ends_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        for index, token_id in enumerate(sample.token_ids[:num_tokens]):
            detokenizer.append(token_id, is_stop_token=ends_by_token and index == num_tokens - 1)
            if is_delta:
                detokenizer.take_delta()
        if finish_reason is not None:
            detokenizer.finish()
            if is_delta:
                detokenizer.take_delta()
        sample.detokenizer = detokenizer
        return detokenizer

    def _output(self, conversation: Conversation, *, final: bool) -> RequestOutput:
        first = conversation.samples[0].request
        prompt_logprobs = self._prompt_logprobs(conversation)
        return RequestOutput(
            request_id=first.request_id,
            prompt=conversation.prompt,
            prompt_token_ids=conversation.prompt_token_ids,
            outputs=[self._completion(conversation, sample) for sample in conversation.samples],
            finished=final,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_scheduled_time=first.first_scheduled_time,
                first_token_time=first.first_token_time,
                finished_time=time.monotonic() if final else None,
                num_preemptions=sum(sample.request.num_preemptions for sample in conversation.samples),
                num_draft_tokens=sum(sample.request.num_draft_tokens for sample in conversation.samples),
                num_accepted_tokens=sum(sample.request.num_accepted_tokens for sample in conversation.samples),
            ),
            num_cached_tokens=first.num_cached_tokens or 0,
            prompt_logprobs=prompt_logprobs,
            lora_request=conversation.lora_request,
        )

    def _prompt_logprobs(self, conversation: Conversation) -> list[dict[int, Logprob] | None] | None:
        """To be called before the samples' tokens are reported. Only the first sample's prompt is scored."""
        first = conversation.samples[0]
        scores = first.request.prompt_scores
        if scores is None or not scores.is_complete:
            return None
        if conversation.params.output_kind is RequestOutputKind.DELTA and (first.num_reported or not first.token_ids):
            return None
        if conversation.prompt_logprobs is None:
            conversation.prompt_logprobs = [
                self._logprobs(scores.found[position]) if position in scores.found else None
                for position in range(scores.num_prompt_tokens)
            ]
        return conversation.prompt_logprobs

    def _completion(self, conversation: Conversation, sample: _Sample) -> CompletionOutput:
        request, params = sample.request, conversation.params
        detokenizer = sample.detokenizer or self._detokenizer(conversation, sample)
        start = 0
        text = None
        if params.output_kind == RequestOutputKind.DELTA:
            start, sample.num_reported = sample.num_reported, len(sample.token_ids)
            text = detokenizer.take_delta()
        if params.logprobs is not None:
            for entry in request.output_logprobs[len(sample.logprobs) :]:
                sample.logprobs.append(self._logprobs(entry))
                sample.cumulative_logprob += entry.logprob
        return CompletionOutput(
            index=request.sample_index,
            text=detokenizer.text if text is None else text,
            token_ids=sample.token_ids[start:],
            cumulative_logprob=sample.cumulative_logprob if params.logprobs is not None else None,
            logprobs=[dict(ranked) for ranked in sample.logprobs[start:]] if params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones."""
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(
            zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
        ):
            ranked.setdefault(token_id, (logprob, rank + 1))
        return {
            token_id: Logprob(logprob, rank, self._tokenizer.decode([token_id], False))
            for token_id, (logprob, rank) in ranked.items()
        }
