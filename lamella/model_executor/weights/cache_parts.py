"""Files that are being written into the cache, and those whose writer was killed.

A writer holds a lock on its part, which the system releases when the process ends, so a part without a lock is
abandoned.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and so nothing is known to be abandoned
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

PART_SUFFIX = ".part"


def remove_abandoned(cache_dir: Path) -> list[Path]:
    """Remove the parts in `cache_dir` whose writer is gone; returns them."""
    removed = []
    for part in cache_dir.glob(f"*/.*{PART_SUFFIX}"):
        with suppress(OSError):  # it is another user's, or gone meanwhile
            if is_abandoned(part):
                part.unlink()
                removed.append(part)
    if removed:
        logger.info("removed %d unfinished files that killed processes left in %s", len(removed), cache_dir)
    return removed


def is_abandoned(part: Path) -> bool:
    """Whether no process writes the part any more. Raises OSError where it cannot be opened."""
    handle = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        return _lock(handle, blocking=False) is True
    finally:
        os.close(handle)


def locked_part(path: Path) -> tuple[int, str]:
    """(handle, name) of a new file that this process holds the lock of."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=PART_SUFFIX, dir=path.parent)
        try:
            _lock(handle, blocking=True)
            # Between the two calls above another process may have found it without a lock.
            if os.path.exists(name) and os.path.samestat(os.stat(name), os.fstat(handle)):
                return handle, name
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, *, blocking: bool) -> bool | None:
    """Whether the lock is ours now; None where the file system has none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
