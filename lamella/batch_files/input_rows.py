"""The rows of a batch file, one at a time, each with the place that it came from."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lamella.argument_checks import shown
from lamella.batch_files.parquet_files import parquet_rows
from lamella.errors import ConfigError
from lamella.text_lines import place


@dataclass(frozen=True, slots=True)
class InputRow:
    """line: of the file, from 1; in a Parquet file the row's number. value: what it holds; error: why it is no row,
    then value is empty. custom_id: its id; None: the line is."""

    line: int
    place: str
    value: dict[str, Any]
    custom_id: str | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """Tells it from every other row of the file."""
        return key_of(self.custom_id, self.line)


def key_of(custom_id: str | None, line: int) -> str:
    return f"line {line}" if custom_id is None else f"id {custom_id}"


def digest(key: str) -> bytes:
    """What is remembered of a key: 16 bytes, which no two rows will have in common by chance."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def input_rows(path: Path) -> Iterator[InputRow]:
    """The rows that are not blank. JSON lines, with gzip where the name ends in .gz, or Parquet. What is wrong with one
    row is its `error`; ConfigError where the file cannot be read on."""
    if path.suffix == ".parquet":
        for number, value in enumerate(parquet_rows(path), start=1):
            yield input_row(number, f"{path}, row {number}", value)
        return
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(number, place(path, number), line)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{place(path, number + 1)} cannot be read ({error}); give a file that can") from error


def _json_row(number: int, where: str, line: bytes) -> InputRow:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return InputRow(number, where, {}, error=f"is no UTF-8 text ({error}); save the file as UTF-8")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return InputRow(number, where, {}, error=f"is not JSON ({error}); one JSON object a line is needed")
    if not isinstance(value, dict):
        return InputRow(number, where, {}, error=f"{shown(value)} is no row; give a JSON object")
    return input_row(number, where, value)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON's")


def input_row(number: int, where: str, value: dict[str, Any]) -> InputRow:
    custom_id = value.get("custom_id")
    if custom_id is None or (isinstance(custom_id, str) and custom_id):
        return InputRow(number, where, value, custom_id)
    error = f"custom_id={shown(custom_id)}: must be a string that is not empty; leave it out to number rows by lines"
    return InputRow(number, where, {}, error=error)


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def require_different_ids(path: Path) -> set[bytes]:
    """Digests of all rows' keys. ConfigError where two rows have one custom_id."""
    found: set[bytes] = set()
    for row in input_rows(path):
        known = digest(row.key)
        if known in found:
            first = next(one for one in input_rows(path) if one.key == row.key)
            raise ConfigError(
                f"{row.place}: custom_id {shown(row.custom_id)} is that of line {first.line}, too; give each row "
                "another, or none"
            )
        found.add(known)
    return found
