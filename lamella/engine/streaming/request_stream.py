"""The outputs of one request, for its caller to iterate over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import NamedTuple

from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.streaming.admission_gate import AdmissionGate
from lamella.engine.streaming.engine_thread import EngineThread
from lamella.engine.streaming.mailbox import Mailbox
from lamella.errors import LamellaError
from lamella.native.fork_guard import FORK_GUARD


class Ask(NamedTuple):
    """What is asked of the engine. parse: checks and tokenises the prompt, away from the caller's loop."""

    request_id: str
    params: SamplingParams
    parse: Callable[[], Awaitable[ParsedPrompt]]


class RequestStream(AsyncIterator[RequestOutput]):
    """An async iterator, which acts like an async generator: the request begins when the first output is asked for. It
    ends when the iterator is left: by `aclose`, by the end of `async with`, by cancelling a task that waits for the
    next output, or by dropping it, as `break` in `async for` does.

    One task at a time may wait for it, in the event loop in which it began. A request that failed has a last output
    with `error` set; asking for another one raises that error.
    """

    def __init__(self, ask: Ask, gate: AdmissionGate, thread: EngineThread) -> None:
        self._ask = ask
        self._gate = gate
        self._thread = thread
        self._mailbox: Mailbox | None = None  # None: not begun
        self._error: LamellaError | None = None  # to be raised after the last output
        self._is_over = False
        self._is_awaited = False

    @property
    def request_id(self) -> str:
        return self._ask.request_id

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_awaited:
            raise RuntimeError(f"request {self.request_id!r}: another task is waiting for its next output")
        if self._is_over:
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopAsyncIteration
        if self._mailbox is not None and self._mailbox.loop is not asyncio.get_running_loop():
            raise RuntimeError(f"request {self.request_id!r} began in another event loop: iterate over it there")
        self._is_awaited = True
        try:
            output = await (self._begin() if self._mailbox is None else self._mailbox.take())
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_awaited = False
        if output.finished:
            self._is_over = True
            self._error = output.error
        return output

    async def _begin(self) -> RequestOutput:
        FORK_GUARD.check()
        params = self._ask.params
        is_known = isinstance(params, SamplingParams)  # `parse` refuses anything else
        mailbox = Mailbox(
            self.request_id,
            params.output_kind if is_known else RequestOutputKind.CUMULATIVE,
            params.n if is_known else 1,
            asyncio.get_running_loop(),
        )
        self._gate.enter(mailbox)
        self._mailbox = mailbox
        if not mailbox.is_admitted:
            self._thread.leave_closed_loops()
        await mailbox.wait_for_admission()
        if not mailbox.has_ended_early:
            self._thread.add(mailbox, await self._ask.parse(), params)
        return await mailbox.take()

    async def aclose(self) -> None:
        """End the request. Its pages are free before the next step begins."""
        if self._is_awaited:
            raise RuntimeError(f"request {self.request_id!r}: a task is waiting for its next output; cancel that task")
        self._leave()

    def _leave(self) -> None:
        if self._mailbox is not None and not self._is_over:
            self._thread.leave(self._mailbox)
        self._is_over = True

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._leave()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
