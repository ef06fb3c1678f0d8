"""Where converted copies of model files live, and how one is written so that readers never see half of it.

    <cache folder>/<model's name>-<digest of its paths>/<kind>-<identity><suffix>
                                                        <kind>-<identity><suffix>.sum     see checksums.py
                                                        .<kind>-<identity>-<random>.part  being written

An entry's name carries the identity of the files it was made from, so a stale entry is simply never found. Writers use
a name of their own and rename at the end. Two processes may do so at once: the last one wins, and both results are the
same. A writer holds a lock on its part, which the system releases when the process ends, so a part without a lock is
abandoned.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from lamella.model_executor.weights.cache_parts import locked_part, remove_abandoned
from lamella.model_executor.weights.cache_trust import distrust, own_folder
from lamella.model_executor.weights.checksums import SUM_SUFFIX, check_sum, write_sum

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 32
_EDGE_BYTES = 1 << 16  # sampled at a file's start, where headers are, and at its end


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/lamella`, or `~/.cache/lamella`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lamella"


def entry_path(cache_dir: Path, files: Sequence[Path], *, kind: str, format_version: int, suffix: str) -> Path:
    """Path of the entry of `kind` made from `files` as they are now.

    A file's state is its path, size, time of change and of status change, and a digest of samples of its content. Who
    edits a file in place can set the time of change back, but not that of the status; the samples are for file systems
    that do not keep it. Raises OSError when a file cannot be looked at.
    """
    identity = _digest([format_version, [_state(file) for file in files]])
    folder = f"{files[0].stem}-{_digest(sorted(str(file.resolve()) for file in files))}"
    return cache_dir / folder / f"{kind}-{identity}{suffix}"


def usable_entry(path: Path) -> bool:
    """Whether the entry at `path` is there, whole, and nobody else's.

    False, with the reason in the log, for one that another user could have written, and for one whose checksum does not
    hold. Parts that killed writers left anywhere in the cache folder are removed.
    """
    remove_abandoned(path.parent.parent)
    if not path.parent.is_symlink() and not os.path.lexists(path):
        return False
    try:
        reason = distrust(path)
    except OSError as error:  # gone meanwhile
        reason = str(error)
    if reason is not None:
        logger.warning("%s is not used: %s", path, reason)
        return False
    return check_sum(path)


@contextmanager
def written_entry(path: Path, *, sources: Sequence[Path] = (), replaces_older: bool = True) -> Iterator[BinaryIO]:
    """A file to write the entry at `path` into, by itself or by its name; it appears there, whole, when the block ends
    without an error.

    sources: noted beside it, for whoever looks through the cache. replaces_older: entries of the same kind, made from
    an earlier state of the same files, are removed. Raises OSError when the folder cannot be written, or is not the
    user's own.
    """
    own_folder(path.parent)
    remove_abandoned(path.parent.parent)
    handle, temp_name = locked_part(path)
    try:
        with open(temp_name, "wb") as file:
            yield file
        write_sum(path, content=Path(temp_name), sources=[str(source.resolve()) for source in sources])
        os.replace(temp_name, path)
        write_sum(path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp_name)
        if not path.exists():
            with suppress(OSError):
                os.unlink(sum_path(path))
        raise
    finally:
        os.close(handle)  # this ends the lock: until here nobody takes the part for abandoned
    kind = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{kind}-*{path.suffix}") if replaces_older else ():
        if other != path:
            remove_entry(other)


def remove_entry(path: Path) -> None:
    """Remove an entry and its checksum. A process that has mapped it keeps its pages."""
    for one in (path, sum_path(path)):
        with suppress(OSError):
            one.unlink()


def sum_path(path: Path) -> Path:
    return path.with_name(path.name + SUM_SUFFIX)


def _state(file: Path) -> list[object]:
    stat = file.stat()
    if not S_ISREG(stat.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(file))  # reading a pipe would wait for its writer
    digest = hashlib.sha256()
    with file.open("rb") as content:
        for start, num_bytes in _samples(stat.st_size):
            content.seek(start)
            digest.update(content.read(num_bytes))
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, digest.hexdigest()]


def _samples(file_bytes: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces that are read: start, end, and some at even distances."""
    stride = max(1, file_bytes // _NUM_SAMPLES)
    inner = [(start, _SAMPLE_BYTES) for start in range(stride, file_bytes, stride)]
    return [(0, _EDGE_BYTES), *inner, (max(0, file_bytes - _EDGE_BYTES), _EDGE_BYTES)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:20]
