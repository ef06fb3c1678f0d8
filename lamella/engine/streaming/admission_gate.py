"""How many requests the engine holds at once: the others wait outside, in order, and cost it nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lamella.engine.streaming.mailbox import Mailbox, MakeError, wake


class AdmissionGate:
    """A place is a request's from before its prompt is tokenised until the engine has nothing more to do with it.

    Any thread may `enter`. `leave` is the engine's thread's alone, which takes no place back while it handles an object
    that is being destroyed: so no lock is ever asked for by a thread that has it.
    """

    def __init__(self, most_inside: int) -> None:
        self.most_inside = most_inside
        self._lock = threading.Lock()
        self._inside: dict[Mailbox, None] = {}  # in order, as the next
        self._waiting: dict[Mailbox, None] = {}
        self._refusal: MakeError | None = None
        self._when_empty: list[Callable[[], None]] = []

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, mailbox: Mailbox) -> None:
        """Give the request a place, or let it wait for one. Its mailbox says when it is admitted. Raises what `stop`
        was given."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if len(self._inside) < self.most_inside and not self._waiting:
                self._inside[mailbox] = None
                mailbox.admit()
            else:
                self._waiting[mailbox] = None

    def leave(self, mailbox: Mailbox) -> bool:
        """Take the request's place back, or its place in the queue, and give it to the next. False where it has left
        already."""
        admitted: list[Mailbox] = []
        with self._lock:
            if mailbox in self._waiting:
                del self._waiting[mailbox]
            elif mailbox in self._inside:
                del self._inside[mailbox]
            else:
                return False
            while self._waiting and len(self._inside) < self.most_inside:
                following = next(iter(self._waiting))
                del self._waiting[following]
                self._inside[following] = None
                following.admit()
                admitted.append(following)
            told = self._take_told()
        self._tell(told)
        for orphan in wake(admitted):
            self.leave(orphan)
        return True

    def is_inside(self, mailbox: Mailbox) -> bool:
        return mailbox in self._inside

    def of(self, request_id: str) -> list[Mailbox]:
        """The requests of this id, inside or waiting."""
        with self._lock:
            return [one for one in (*self._inside, *self._waiting) if one.request_id == request_id]

    def of_closed_loops(self) -> list[Mailbox]:
        """The requests whose event loop has been closed: nobody will ever ask for their outputs."""
        with self._lock:
            return [one for one in (*self._inside, *self._waiting) if one.loop.is_closed()]

    def stop(self, refusal: MakeError) -> None:
        """Nobody enters from now on; those inside and waiting are not touched."""
        with self._lock:
            self._refusal = refusal

    def clear(self, refusal: MakeError) -> list[Mailbox]:
        """`stop`, and forget all. Returns them."""
        with self._lock:
            self._refusal = refusal
            left = [*self._inside, *self._waiting]
            self._inside.clear()
            self._waiting.clear()
            told = self._take_told()
        self._tell(told)
        return left

    def tell_when_empty(self, tell: Callable[[], None]) -> None:
        """Call `tell` once nobody is inside or waiting: at once, or later in the engine's thread."""
        with self._lock:
            self._when_empty.append(tell)
            told = self._take_told()
        self._tell(told)

    def _take_told(self) -> list[Callable[[], None]]:
        if self._inside or self._waiting:
            return []
        told, self._when_empty = self._when_empty, []
        return told

    @staticmethod
    def _tell(told: list[Callable[[], None]]) -> None:
        for tell in told:
            tell()
