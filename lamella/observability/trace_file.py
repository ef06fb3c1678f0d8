"""A file in Chrome's trace event format, written as it goes.

The file is a JSON array with one event a line. What a killed process leaves has no closing bracket: Perfetto and
chrome://tracing take it all the same, and so does `read_trace`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lamella.errors import ConfigError

logger = logging.getLogger(__name__)


class TraceFile:
    """Raises ConfigError where the file cannot be opened. Where it cannot be written later, as on a full disk, the
    trace ends there with a warning: the engine goes on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"profile={str(path)!r} cannot be written: {error}; give another file") from error
        self._separator = "[\n"

    def write(self, events: list[str]) -> None:
        """Append events, each a JSON object, and hand them to the operating system."""
        if not events or self._file.closed:
            return
        try:
            self._file.write(self._separator + ",\n".join(events))
            self._file.flush()
            self._separator = ",\n"
        except OSError as error:
            logger.warning("the trace %s ends here, because it cannot be written: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.close()

    def close(self) -> None:
        """End the array. Closing twice is fine."""
        if self._file.closed:
            return
        try:
            self._file.write("[\n]\n" if self._separator == "[\n" else "\n]\n")
            self._file.close()
        except OSError as error:
            logger.warning("the trace %s has no end, because it cannot be written: %s", self.path, error)


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a trace file, also of one that was never closed; a last line that is cut is left out.

    Raises ConfigError for files that are no trace of lamella."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                text = line.strip().rstrip(",")
                if text in ("[", "]", "", "[]"):
                    continue
                try:
                    event = json.loads(text)
                except json.JSONDecodeError as error:
                    if not line.endswith("\n"):  # the process was killed while it wrote
                        return
                    raise ConfigError(
                        f"{path}:{number} is no event of a trace ({error.msg}); give a file that profile= wrote"
                    ) from error
                if not isinstance(event, dict) or "ph" not in event:
                    raise ConfigError(f"{path}:{number} is no event of a trace; give a file that profile= wrote")
                yield event
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file that profile= wrote") from error
