"""One thread at a time, in turn: how calls from several threads share one engine."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from lamella.native.fork_guard import FORK_GUARD

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Turns:
    """A lock that its holder may take again, and that nobody takes twice while another thread waits for it.

    A plain lock is nearly always won by the thread that has just let go of it: a loop of steps would keep `abort` or
    `close` of another thread waiting until its last request ends. Here who waits holds the gate, so that the loop
    queues behind it. A KeyboardInterrupt that falls between two lines here can leave the lock with its thread, which
    may go on; the end of its next call lets go of it.
    """

    __slots__ = ("_depth", "_gate", "_holder", "_lock")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._holder != thread:  # only a thread itself can have written its own number here
            with self._gate:
                self._lock.acquire()
            self._holder = thread
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            with contextlib.suppress(RuntimeError):  # once it is not this thread's any more
                while True:
                    self._lock.release()


class TakesTurns(Protocol):
    _turns: Turns


Self = TypeVar("Self", bound=TakesTurns)


def in_turn(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Calls of the object's methods that are marked so queue. Raises ForkedProcessError where a lock may have been
    copied while another thread, which is not here, held it."""

    @functools.wraps(method)
    def queued(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        FORK_GUARD.check()
        with self._turns:
            return method(self, *args, **kwargs)

    return queued
