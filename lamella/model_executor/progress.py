"""How far a long task is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")

BAR_SECONDS = 0.1
LINE_SECONDS = 10.0  # between two lines, so that they do not fill a log file


class Progress:
    """`total` units of something called `label`, on stderr or `stream`. total: None where nobody knows yet.

    announces: where there is no terminal, the first line comes at once; else nothing is written for what ends within
    LINE_SECONDS.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        *,
        announces: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._num_done = 0
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty() or "ipykernel" in sys.modules:  # notebooks draw bars, too
            self._bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True, dynamic_ncols=True, file=self._stream)
        elif announces:
            self._write(f"{label} …")
        self._next_time = clock() + self._period

    @property
    def is_due(self) -> bool:
        """Whether `show` would change what is seen, for callers to whom finding the numbers costs something."""
        return self._clock() >= self._next_time

    def show(self, num_done: int, note: str, total: int | None = None) -> None:
        """`num_done` of `total` units are done; it never goes back. note: what a line says of them, or a bar behind
        its numbers."""
        self._total = self._total if total is None else total
        if self._total is not None:
            num_done = min(num_done, self._total)
        num_new = max(0, num_done - self._num_done)
        self._num_done += num_new
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(num_new)
        elif self.is_due:
            share = "" if self._total is None else f"{100 * self._num_done // max(1, self._total)} %"
            self._write(f"{self._label}: {', '.join(filter(None, (share, note)))}")
        else:
            return
        self._next_time = self._clock() + self._period

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def _period(self) -> float:
        return LINE_SECONDS if self._bar is None else BAR_SECONDS

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def with_progress(
    items: Iterable[Item], label: str, num_bytes: int, size: Callable[[Item], int], *, is_shown: bool
) -> Iterator[Item]:
    """The items, with their bytes counted on a Progress while they are taken."""
    if not is_shown:
        yield from items
        return
    progress, num_done = Progress(f"{label} ({num_bytes / 1e9:.1f} GB)", num_bytes, "B", announces=True), 0
    try:
        for item in items:
            yield item
            num_done += size(item)
            progress.show(num_done, "")
    finally:
        progress.close()
