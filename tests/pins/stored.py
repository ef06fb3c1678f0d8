"""The pinned values, JSON files here that `python -m tests.pins.make` writes, and what differs from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MAKE = "PYTHONPATH=benchmarks python -m tests.pins.make"
MOST_SHOWN = 30


def load(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def store(name: str, values: Mapping[str, Any]) -> Path:
    path = FOLDER / f"{name}.json"
    path.write_text(_text(values) + "\n", encoding="utf-8")
    return path


def require_equal(name: str, expected: Any, found: Any) -> None:
    """Raises AssertionError with a line for each value that differs, and with the command that pins what is found."""
    before, after = flat(expected), flat(found)
    lines = [
        f"{key}: pinned {before.get(key, 'nothing')}, now {after.get(key, 'nothing')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]
    if lines:
        shown = lines[:MOST_SHOWN] + ([f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else [])
        raise AssertionError(
            f"{len(lines)} of {len(before)} values differ from tests/pins/{name}.json:\n  "
            + "\n  ".join(shown)
            + f"\nIf that is what a change is for, `{MAKE} {name}` pins the new values; say why in the commit."
        )


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """{"a": {"b": [1, 2]}} -> {"a / b / 0": 1, "a / b / 1": 2}; an empty list or mapping is a value."""
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    found: dict[str, Any] = {}
    for name, part in items:
        found |= flat(part, f"{key} / {name}" if key else str(name))
    return found or {key: value}


def _text(value: Any, indent: int = 0) -> str:
    """JSON that has a mapping or list on one line where it fits."""
    plain = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list, tuple)) or len(plain) + indent <= 116:
        return plain
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_text(part, indent + 1)}" for key, part in value.items()]
    else:
        parts = [_text(part, indent + 1) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(inner + part for part in parts) + f"\n{' ' * indent}{closing}"
