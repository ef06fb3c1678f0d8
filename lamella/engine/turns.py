"""One thread at a time, in turn: how calls from several threads share one engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from lamella.native.fork_guard import FORK_GUARD

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PAUSE_SECONDS = 0.0005
_MOST_PAUSES = 1000


class Turns:
    """A lock that its holder may take again, and that nobody takes twice while another thread waits for it.

    A plain lock is nearly always won by the thread that has just let go of it: a loop of steps would keep `abort` or
    `close` of another thread waiting until its last request ends. Here a thread that comes while others wait pauses
    until one of them has the lock.

    Python raises KeyboardInterrupt between any two of its instructions, but not between taking a lock by `with` and the
    block that gives it back. So the lock is always right. Everything else here is a hint that may be stale after an
    interrupt, which then costs half a second once.
    """

    __slots__ = ("_holder", "_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None  # a hint: id of the thread that has the lock
        self._waiting: set[int] = set()  # a hint: ids of the threads that wait

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a turn, as far as is known."""
        return len(self._waiting)

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn. After an interrupt it may be so without the thread knowing, until it takes
        another turn."""
        return self._holder == threading.get_ident()

    def run(self, work: Callable[[], Result]) -> Result:
        """Do the work when it is this thread's turn."""
        thread = threading.get_ident()
        if self._holder == thread:  # no other thread writes this one's id
            with self._lock:
                return work()
        for _ in range(_MOST_PAUSES):
            if not self._waiting - {thread}:
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            self._waiting.clear()
        self._waiting.add(thread)
        try:
            with self._lock:
                self._waiting.discard(thread)
                self._holder = thread
                try:
                    return work()
                finally:
                    self._holder = None
        finally:
            self._waiting.discard(thread)


class TakesTurns(Protocol):
    _turns: Turns


Self = TypeVar("Self", bound=TakesTurns)


def in_turn(
    method: Callable[Concatenate[Self, Arguments], Result],
) -> Callable[Concatenate[Self, Arguments], Result]:
    """Decorator of methods: all calls of methods marked so, of one object, wait for each other. Raises
    ForkedProcessError in a forked child: the lock may have been copied while a thread held it that the child does not
    have."""

    @functools.wraps(method)
    def queued(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        FORK_GUARD.check()
        return self._turns.run(lambda: method(self, *args, **kwargs))

    return queued
