"""Where the engine's thread leaves what a request's caller is to get, and the caller, in its event loop, finds it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from lamella.engine.outputs import RequestOutput
from lamella.engine.sampling_params import RequestOutputKind
from lamella.engine.streaming.merged_outputs import merge_outputs

MakeError = Callable[[], Exception]


class Mailbox:
    """Of one request. It holds one output at most: one that comes before the last was taken is merged with it.

    The engine's thread puts; the caller's loop takes and waits. Whoever puts wakes the caller afterwards, by `wake`.
    num_samples: how many outputs the request is to have, for one that ends before the engine knows of it.
    """

    __slots__ = ("_error", "_is_admitted", "_kind", "_lock", "_output", "_waiter", "loop", "num_samples", "request_id")

    def __init__(
        self, request_id: str, kind: RequestOutputKind, num_samples: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request_id = request_id
        self.num_samples = num_samples
        self.loop = loop
        self._kind = kind
        self._lock = threading.Lock()
        self._is_admitted = False
        self._output: RequestOutput | None = None
        self._error: MakeError | None = None
        self._waiter: asyncio.Future[None] | None = None  # its loop alone touches it

    # The engine's side, in any thread

    def admit(self) -> None:
        self._is_admitted = True

    @property
    def is_admitted(self) -> bool:
        return self._is_admitted

    def put(self, output: RequestOutput) -> bool:
        """Whether the caller is to be woken: where an output lay here already, it has been."""
        with self._lock:
            before = self._output
            self._output = output if before is None else merge_outputs(before, output, self._kind)
        return before is None

    def fail(self, make_error: MakeError) -> None:
        """Let the caller get an error of its own once it has taken what is here. Of several, the first counts."""
        with self._lock:
            self._error = self._error or make_error

    # The caller's side, in its loop

    async def wait_for_admission(self) -> None:
        """Until there is a place, or an end: then `take` has that."""
        while not (self._is_admitted or self._output is not None or self._error is not None):
            await self._wait()

    @property
    def has_ended_early(self) -> bool:
        """Whether something came for a request of which the engine knows nothing yet."""
        return self._output is not None or self._error is not None

    async def take(self) -> RequestOutput:
        """What has come since the last call, once there is anything. Raises the error where there is one."""
        while True:
            with self._lock:
                output, self._output = self._output, None
            if output is not None:
                return output
            if self._error is not None:
                raise self._error()
            await self._wait()

    async def _wait(self) -> None:
        # Nothing else runs in this loop between the look into the box and the suspension here, so that a wake that
        # comes meanwhile finds the waiter.
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _stir(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def wake(mailboxes: Iterable[Mailbox]) -> list[Mailbox]:
    """Let callers look into their boxes; those of one loop are woken together. Any thread may call. Returns those
    whose loop is closed, so that nobody will ever look."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    for mailbox in mailboxes:
        by_loop.setdefault(mailbox.loop, []).append(mailbox)
    orphans: list[Mailbox] = []
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_stir_all, group)
        except RuntimeError:  # the loop is closed
            orphans += group
    return orphans


def _stir_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox._stir()
