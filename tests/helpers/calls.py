"""How many calls something takes: a cost that is the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def num_calls(action: Callable[[], Any]) -> int:
    """Calls of Python and C functions while `action` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
