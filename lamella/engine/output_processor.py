"""From sampled tokens to what the user sees: text, stop strings, RequestOutputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lamella.engine.detokenizer import IncrementalDetokenizer
from lamella.engine.new_tokens import NewTokens
from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from lamella.engine.request import Request
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.stop_strings import StopStrings
from lamella.model_executor.step_plan import TokenLogprobs
from lamella.model_executor.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Sample:
    """One of the n samples of a user's request."""

    request: Request
    detokenizer: IncrementalDetokenizer
    token_ids: list[int]
    num_reported: int = 0  # tokens in earlier DELTA outputs
    cumulative_logprob: float = 0.0  # of the tokens in `logprobs`
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of tokens in earlier outputs


@dataclass(slots=True, eq=False)
class _Conversation:
    """A user's request: its samples and what does not change between outputs."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[_Sample]


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._conversations: dict[str, _Conversation] = {}
        self._last_stops: StopStrings | None = None  # often those of the next request as well

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._conversations

    def __len__(self) -> int:
        return len(self._conversations)

    def add(self, prompt: str | None, params: SamplingParams, requests: list[Request]) -> None:
        stops = self._prepare_stops(params)
        samples = [_Sample(request, IncrementalDetokenizer(self._tokenizer, params, stops), []) for request in requests]
        ids = requests[0].token_ids[: requests[0].num_prompt_tokens].tolist()
        self._conversations[requests[0].request_id] = _Conversation(prompt, ids, params, samples)

    def _prepare_stops(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self._last_stops is None or self._last_stops.given != params.stop:
            self._last_stops = StopStrings(params.stop)
        return self._last_stops

    def requests_of(self, request_id: str) -> list[Request]:
        return [sample.request for sample in self._conversations[request_id].samples]

    def process(self, new_tokens: NewTokens) -> tuple[list[RequestOutput], list[tuple[Request, str]]]:
        """Take in a step's tokens.

        Returns the outputs due now, and the requests that a stop string ended (with the string): the
        caller has the scheduler finish those.
        """
        stopped: list[tuple[Request, str]] = []
        touched: dict[str, None] = {}
        for request, token_id in new_tokens.each():
            conversation = self._conversations[request.request_id]
            sample = conversation.samples[request.sample_index]
            sample.token_ids.append(token_id)
            touched[request.request_id] = None
            # The text of an end token is no output, unless asked for.
            is_end = request.finish_reason == "stop"
            stop_string = sample.detokenizer.append(token_id, is_stop_token=is_end)
            if stop_string is not None:
                request.finish_reason, request.stop_reason = "stop", stop_string
                stopped.append((request, stop_string))
            if request.is_finished:
                sample.detokenizer.finish()
        for request in new_tokens.failed:
            self._conversations[request.request_id].samples[request.sample_index].detokenizer.finish()
            touched[request.request_id] = None
        return self._outputs(list(touched)), stopped

    def abort(self, request_id: str) -> RequestOutput:
        """The last output of a request whose unfinished samples were aborted; it is then forgotten."""
        for sample in self._conversations[request_id].samples:
            sample.detokenizer.finish()
        return self._output(request_id, final=True)

    def clear(self) -> None:
        self._conversations.clear()

    def _outputs(self, request_ids: list[str]) -> list[RequestOutput]:
        outputs = []
        for request_id in request_ids:
            conversation = self._conversations[request_id]
            final = all(sample.request.is_finished for sample in conversation.samples)
            if final or conversation.params.output_kind != RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(request_id, final=final))
        return outputs

    def _output(self, request_id: str, *, final: bool) -> RequestOutput:
        conversation = self._conversations[request_id]
        first = conversation.samples[0].request
        output = RequestOutput(
            request_id=request_id,
            prompt=conversation.prompt,
            prompt_token_ids=conversation.prompt_token_ids,
            outputs=[self._completion(sample, conversation.params) for sample in conversation.samples],
            finished=final,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_scheduled_time=first.first_scheduled_time,
                first_token_time=first.first_token_time,
                finished_time=time.monotonic() if final else None,
                num_preemptions=sum(sample.request.num_preemptions for sample in conversation.samples),
            ),
            num_cached_tokens=first.num_cached_tokens or 0,
        )
        if final:
            del self._conversations[request_id]
        return output

    def _completion(self, sample: _Sample, params: SamplingParams) -> CompletionOutput:
        request = sample.request
        start = 0
        text = None
        if params.output_kind == RequestOutputKind.DELTA:
            start, sample.num_reported = sample.num_reported, len(sample.token_ids)
            text = sample.detokenizer.take_delta()
        if params.logprobs is not None:
            for entry in request.output_logprobs[len(sample.logprobs) :]:
                sample.logprobs.append(self._logprobs(entry))
                sample.cumulative_logprob += entry.logprob
        return CompletionOutput(
            index=request.sample_index,
            text=sample.detokenizer.text if text is None else text,
            token_ids=sample.token_ids[start:],
            cumulative_logprob=sample.cumulative_logprob if params.logprobs is not None else None,
            logprobs=[dict(ranked) for ranked in sample.logprobs[start:]] if params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The sampled token first, then the most likely ones."""
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(
            zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
        ):
            ranked.setdefault(token_id, (logprob, rank + 1))
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self._tokenizer.decode([token_id], False))
            for token_id, (logprob, rank) in ranked.items()
        }
