"""Regular expressions of an adapter's config, which nobody has checked: matched within a time limit."""

from __future__ import annotations

import time

import regex

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import shown

# Of processor time, for all matches of one adapter. Those of honest patterns take microseconds each; a thread that the
# system keeps waiting has none of it.
SECONDS = 5.0


class PatternClock:
    """What is left of the time for the patterns of the file `place`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._seconds_left = SECONDS

    def matches(self, field: str, pattern: str, text: str, *, wrapped: str = "{}") -> regex.Match[str] | None:
        """`text` matched as a whole. field: which of the file's the pattern is of; wrapped: what it stands in.

        Raises ModelLoadError for a pattern that is none, and where the time is over.
        """
        started = time.thread_time()
        try:
            compiled = regex.compile(wrapped.format(pattern))
            return compiled.fullmatch(text, timeout=max(self._seconds_left, 1e-3))
        except TimeoutError as error:
            raise ModelLoadError(
                f"{self._place}: {field}={shown(pattern)}: matching it takes too long; write it without repetitions "
                "within repetitions, or give a list of module names"
            ) from error
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise ModelLoadError(
                f"{self._place}: {field}={shown(pattern)}: no regular expression ({error}); give one, or a list of "
                "module names"
            ) from error
        finally:
            self._seconds_left -= time.thread_time() - started
