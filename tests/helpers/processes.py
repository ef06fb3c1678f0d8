"""The processes of this machine, as the kernel tells of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def children_of(process_id: int) -> set[int]:
    """The running processes that it has started, without those that have ended and wait to be asked for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process_id and state != "Z":
            found.add(int(stat.parent.name))
    return found


def called(words: str) -> set[int]:
    """The running processes whose command line has these words."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_text(errors="replace").replace("\0", " "):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether it is so within that time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
