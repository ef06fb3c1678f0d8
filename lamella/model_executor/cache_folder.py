"""Where converted copies of model files live, and how one is written so that readers never see half of it.

An entry's name carries the identity of the files it was made from (path, size, modification time), so a
stale entry is simply never found. Writers use a name of their own and rename at the end: two processes may
race, the last one wins, and both results are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/lamella`, or `~/.cache/lamella`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lamella"


def entry_path(cache_dir: Path, files: Sequence[Path], *, kind: str, format_version: int, suffix: str) -> Path:
    """Path of the entry of `kind` made from `files` as they are now.

    Raises OSError when a file cannot be looked at.
    """
    states = []
    for file in files:
        stat = file.stat()
        states.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    identity = _digest([format_version, states])
    folder = f"{files[0].stem}-{_digest(sorted(str(file.resolve()) for file in files))}"
    return cache_dir / folder / f"{kind}-{identity}{suffix}"


@contextmanager
def written_entry(path: Path) -> Iterator[BinaryIO]:
    """A file to write the entry at `path` into; it appears there, whole, when the block ends without an error.

    Older entries of the same kind, made from an earlier state of the same files, are removed.
    Raises OSError when the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temp_name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temp_name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp_name)
        raise
    kind = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{kind}-*{path.suffix}"):
        if other != path:
            # A process that has it mapped keeps its pages.
            with suppress(OSError):
                other.unlink()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]
