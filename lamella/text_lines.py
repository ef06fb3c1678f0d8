"""Lines of a text file with their numbers, so that what is wrong in one can be found."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lamella.errors import ConfigError


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of each line that is not blank. Reads gzip where the name ends in .gz.

    Lines end with a line feed and nothing else: text may hold other characters that Python takes for line ends.
    Raises ConfigError with file and line for bytes that are no UTF-8, and for a file that cannot be read on.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{place(path, number)} is no UTF-8 text ({error}); save the file as UTF-8"
                    ) from None
                if text.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{place(path, number + 1)} cannot be read ({error}); give a file that can") from error


def parsed_json(path: Path, number: int, text: str) -> Any:
    """The JSON value on a line, or ConfigError with file and line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place(path, number)} is not JSON ({error}); one JSON value a line is needed") from None


def place(path: Path, number: int) -> str:
    return f"{path}, line {number}"


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
