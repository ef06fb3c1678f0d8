"""When requests arrive: a fixed number of sessions, each of which sends its next turn when it has its answer.

Nothing but the standard library here: other interpreters read this file too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    @property
    def session(self) -> str: ...


SomeTurn = TypeVar("SomeTurn", bound=Turn)


class ClosedLoop(Generic[SomeTurn]):
    """At most `num_sessions` sessions are open, each with one turn on its way. When a session has no turn left, the
    next one opens in its place. Sessions open in the order of their first turns."""

    def __init__(self, turns: Iterable[SomeTurn], num_sessions: int) -> None:
        self._turns_of: dict[str, deque[SomeTurn]] = {}
        for turn in turns:
            self._turns_of.setdefault(turn.session, deque()).append(turn)
        self._unopened = deque(self._turns_of)
        self._num_sessions = num_sessions

    def start(self) -> list[SomeTurn]:
        """The turns that arrive first."""
        count = min(self._num_sessions, len(self._unopened))
        return [self._turns_of[self._unopened.popleft()].popleft() for _ in range(count)]

    def answer(self, turn: SomeTurn) -> SomeTurn | None:
        """`turn` is answered: the turn that arrives now, if any is left."""
        following = self._turns_of[turn.session]
        if not following:
            if not self._unopened:
                return None
            following = self._turns_of[self._unopened.popleft()]
        return following.popleft()
