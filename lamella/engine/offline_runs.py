"""The calls of an LLM that have requests in its engine: one that `generate` makes, and streams that are being read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from lamella.engine.engine import Engine
from lamella.engine.generate_progress import GenerateProgress
from lamella.engine.held_interrupts import HeldInterrupts
from lamella.engine.offline_requests import CheckedRequest, RefusedRequest, refusal
from lamella.engine.outputs import RequestOutput
from lamella.engine.sampling_params import RequestOutputKind
from lamella.errors import EngineClosedError, InterruptedRequestError, LamellaError, RequestFailedError


class OfflineRun:
    """One call: its requests, taken as they are needed, and their outputs.

    requests: checked ones. most_ahead: how many requests are taken and not given back yet, at most; None: all are
    taken at once. in_order: outputs become ready in the order of the requests.
    """

    def __init__(
        self,
        requests: Iterator[CheckedRequest | RefusedRequest],
        progress: GenerateProgress,
        *,
        most_ahead: int | None,
        returns_errors: bool,
        in_order: bool = False,
        name: str = "prompts",
    ) -> None:
        self.requests = requests
        self.progress = progress
        self.most_ahead = most_ahead
        self.returns_errors = returns_errors
        self.name = name
        self.num_taken = 0
        self.is_exhausted = False
        self.unfinished: dict[str, int] = {}  # request id -> index
        self.ready: deque[RequestOutput] = deque()
        self._is_told = False
        self._in_order = in_order
        self._num_ready = 0  # all that were ever ready, where they come in order
        self._early: dict[int, RequestOutput] = {}  # index -> an output that waits for those before it

    @property
    def is_done(self) -> bool:
        return self.is_exhausted and not self.unfinished and not self.ready

    @property
    def has_room(self) -> bool:
        num_ahead = len(self.unfinished) + len(self.ready) + len(self._early)
        return not self.is_exhausted and (self.most_ahead is None or num_ahead < self.most_ahead)

    def give(self, output: RequestOutput) -> None:
        """An output that is the last of its request; it has its index."""
        assert output.index is not None
        if not self._in_order:
            self.ready.append(output)
            return
        self._early[output.index] = output
        while self._num_ready in self._early:
            self.ready.append(self._early.pop(self._num_ready))
            self._num_ready += 1

    def close_progress(self) -> None:
        if not self._is_told:
            self._is_told = True
            self.progress.close()

    def require_right(self, output: RequestOutput) -> RequestOutput:
        """The output; raises its error where errors are raised. A request that failed alone is an output in any
        case."""
        if output.error is None or self.returns_errors or isinstance(output.error, RequestFailedError):
            return output
        raise output.error


class OfflineRuns:
    """All calls of one LLM. Whoever steps for one of them steps for all: each output goes to the call it belongs to.

    Calls must not overlap in time but on one thread (`Turns`). Whatever is raised at whatever line, `end` ends what a
    run has left; where that is interrupted, the next call of any method does it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._interrupts = HeldInterrupts()
        self._next_id = itertools.count()
        self._run_of: dict[str, OfflineRun] = {}  # the requests of all runs that have not finished
        self._ending: list[OfflineRun] = []  # to be aborted before anything else is done

    def begin(self) -> None:
        """Refuse to begin beside requests that are no call's."""
        self.finish_ending()
        num_foreign = self._engine.num_unfinished_requests - len(self._run_of)
        if num_foreign > 0:
            raise LamellaError(
                f"the engine still has {num_foreign} requests from add_request: step until they are finished, or "
                "abort them, before calling generate"
            )

    def advance(self, run: OfflineRun) -> None:
        """Take requests while there is room for them; then, unless an output is ready, run a step."""
        self.finish_ending()
        while run.has_room:
            self._take(run)
        if run.ready or not run.unfinished:
            return
        if not self._engine.has_unfinished_requests():
            raise self._missing()
        self._interrupts.run(lambda: self._step(run))

    def end(self, run: OfflineRun) -> dict[int, RequestOutput]:
        """Abort what has not finished; returns the last outputs, by index. Ending twice is fine."""
        last: dict[int, RequestOutput] = {}
        self._ending.append(run)
        self.finish_ending(last)
        run.close_progress()
        return last

    def abandon(self, run: OfflineRun) -> None:
        """`end` for a finalizer, which may run in the middle of anything: now if nothing is under way, else soon."""
        self._ending.append(run)
        if not self._engine.is_called_here:
            self.finish_ending()
        run.close_progress()

    def finish_ending(self, last: dict[int, RequestOutput] | None = None) -> None:
        while self._ending:
            run = self._ending[-1]
            if not self._engine.is_closed:
                for output in self._engine.abort(list(run.unfinished)):
                    if last is not None and (index := run.unfinished.get(output.request_id)) is not None:
                        last[index] = dataclasses.replace(output, index=index)
            for request_id in list(run.unfinished):
                self._run_of.pop(request_id, None)
            run.unfinished = {}
            run.is_exhausted = True
            with contextlib.suppress(ValueError):  # a finalizer may have done the same meanwhile
                self._ending.remove(run)

    def _take(self, run: OfflineRun) -> None:
        request = next(run.requests, None)
        if request is None:
            run.is_exhausted = True
            return
        index, request_id = run.num_taken, f"llm-{next(self._next_id)}"
        if isinstance(request, CheckedRequest):
            run.unfinished[request_id] = index
            self._run_of[request_id] = run
            try:
                params = dataclasses.replace(request.params, output_kind=RequestOutputKind.FINAL_ONLY)
                self._engine.add_parsed(request_id, request.parsed, params)
            except LamellaError as error:
                del run.unfinished[request_id], self._run_of[request_id]
                prompt = request.parsed.text
                request = refusal(prompt, error, index, returns_errors=run.returns_errors, name=run.name)
            else:
                run.progress.add(request_id, most_tokens(request, self._engine.max_model_len))
        run.num_taken = index + 1
        if isinstance(request, RefusedRequest):
            output = refused_output(request_id, index, request.prompt, request.error)
            run.give(output)
            run.progress.step([output])

    def _step(self, run: OfflineRun) -> None:
        """To be run with interrupts held back: an output that the engine has returned is kept by nobody else."""
        outputs = self._engine.step()
        own: list[RequestOutput] = []
        for output in outputs:
            owner = self._run_of.pop(output.request_id, None)
            if owner is None:
                continue
            index = owner.unfinished.pop(output.request_id, None)
            if index is None:
                continue
            owner.give(dataclasses.replace(output, index=index, error=output.error or _failure(output)))
            if owner is run:
                own.append(output)
            else:
                owner.progress.step([output])
        run.progress.step(own)

    def _missing(self) -> LamellaError:
        if self._engine.is_closed:
            return EngineClosedError("the engine was closed while generate ran: its unfinished requests are dropped")
        return LamellaError(
            "outputs are missing: something else stepped the engine or aborted its requests while generate ran; "
            "leave the engine to generate until it returns"
        )


def most_tokens(request: CheckedRequest, max_model_len: int) -> int:
    """The most tokens that its prompt and output can have together."""
    num_tokens, params = len(request.parsed.token_ids), request.params
    return num_tokens + (max_model_len - num_tokens if params.max_tokens is None else params.max_tokens) * params.n


def refused_output(request_id: str, index: int, prompt: Any, error: LamellaError) -> RequestOutput:
    """The output of a request that never ran."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt")
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        error=error,
        index=index,
    )


def interrupted_output(output: RequestOutput | None, index: int, prompt: Any = None) -> RequestOutput:
    """What is returned of a request after Ctrl-C. output: its last; None: there is none."""
    if output is None:
        error = InterruptedRequestError("Ctrl-C came before this request had run; call again with its prompt")
        return refused_output(f"index-{index}", index, prompt, error)
    if all(completion.finish_reason != "abort" for completion in output.outputs):
        return dataclasses.replace(output, error=output.error or _failure(output))
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    return dataclasses.replace(
        output,
        error=InterruptedRequestError(
            f"Ctrl-C came when this request had generated {num_tokens} tokens; call again with its prompt"
        ),
    )


def _failure(output: RequestOutput) -> RequestFailedError | None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            return RequestFailedError(f"sample {completion.index} ended: {completion.stop_reason}")
    return None
