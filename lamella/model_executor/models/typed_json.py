"""A JSON file that holds one object, as typed fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.weights.regular_files import read_regular_file

MAX_JSON_BYTES = 64 << 20  # the largest published tokenizer.json has about half of it


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> TypedFields:
    """The object in the JSON file at `path`; errors name the file by its path.

    Raises ModelLoadError: not there, no regular file, too long, not UTF-8, not JSON, not an object, nested too deep, or
    a name that one object has twice. NaN and Infinity, which json reads, are left to the readers of fields.
    """
    return parse_json_object(read_regular_file(path, max_bytes=max_bytes), path)


def parse_json_object(data: bytes, place: object) -> TypedFields:
    """As `read_json_object`, from the file's bytes; `place` is how errors name the file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{place} cannot be read as JSON: it is not UTF-8 ({error}); save it as UTF-8") from error
    if text.startswith("\ufeff"):
        raise ModelLoadError(f"{place} cannot be read as JSON: it begins with a byte order mark; save it without one")
    try:
        value = json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ModelLoadError(f"{place} cannot be read as JSON: it is nested too deep, so it is damaged") from error
    except ValueError as error:  # includes integers of thousands of digits
        raise ModelLoadError(f"{place} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{place} holds a {type(value).__name__}, not a JSON object")
    return TypedFields(value, place)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object names {shown(twice)} twice; keep one of the two")
    return values
