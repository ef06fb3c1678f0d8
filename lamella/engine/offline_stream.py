"""What `LLM.stream` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from lamella.engine.offline_runs import OfflineRun, OfflineRuns
from lamella.engine.outputs import RequestOutput
from lamella.engine.turns import Turns
from lamella.errors import LamellaError


class OutputStream(Iterator[RequestOutput]):
    """Yields outputs as their requests finish, or in order. Prompts are taken, and steps run, while the next output is
    asked for, and at no other time but when another call of the same LLM steps.

    Leaving it aborts what has not finished and frees its pages: at its end, by an exception that it raises, by `close`
    or the end of a `with` block, or when nobody has it any more, as after `break`. Any thread may ask for the next
    output, one at a time.
    """

    def __init__(self, runs: OfflineRuns, run: OfflineRun, turns: Turns) -> None:
        self._runs = runs
        self._run = run
        self._turns = turns
        self._is_closed = False

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> RequestOutput:
        if self._is_closed:
            raise StopIteration
        try:
            output = self._turns.run(self._advance)
        except BaseException:
            self.close()
            raise
        if output is None:
            self.close()
            raise StopIteration
        return output

    def _advance(self) -> RequestOutput | None:
        run = self._run
        if not run.ready:
            self._runs.begin()
        while not run.ready and not run.is_done:
            self._runs.advance(run)
        return run.require_right(run.ready.popleft()) if run.ready else None

    def close(self) -> None:
        """End it, and abort what has not finished. Closing twice is fine."""
        if not self._is_closed:
            self._turns.run(lambda: self._runs.end(self._run))
            self._is_closed = True

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Where __init__ was refused there is nothing to end.
        if not getattr(self, "_is_closed", True):
            self._is_closed = True
            with contextlib.suppress(LamellaError):  # in a forked child
                self._runs.abandon(self._run)
