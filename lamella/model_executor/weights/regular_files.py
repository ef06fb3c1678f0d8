"""Opening the files of a model: only regular ones, for a pipe named like a file would block for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lamella.errors import ModelLoadError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_there(path: Path) -> bool:
    """Whether `path` names anything: a link to nowhere counts, so that whoever reads it says what is wrong."""
    return os.path.lexists(path)


def open_regular_file(path: Path) -> BinaryIO:
    """`path`, opened for reading without buffering of its own. Symbolic links are followed, as hub caches need.

    Raises ModelLoadError when it is not there, cannot be read, or is no regular file.
    """
    try:
        # Looked at before it is opened, because opening a device may already do something, and again afterwards,
        # because it may have been replaced between the two. O_NONBLOCK: opening a pipe waits for its writer otherwise.
        _refuse_other_kinds(path, os.stat(path).st_mode)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        try:
            _refuse_other_kinds(path, os.fstat(handle).st_mode)
            return os.fdopen(handle, "rb", buffering=0)
        except BaseException:
            os.close(handle)
            raise
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Everything in `path`. Raises ModelLoadError as `open_regular_file`, and when it is longer than `max_bytes`."""
    with open_regular_file(path) as file:
        try:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > max_bytes:
                raise ModelLoadError(
                    f"{path} is {num_bytes} bytes long; a file of this kind has at most {max_bytes}, so it is damaged "
                    "or another file"
                )
            parts = []
            while part := file.read(max_bytes + 1):  # a raw read may return less than it was asked for
                parts.append(part)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return b"".join(parts)


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise ModelLoadError(f"{path} is {kind}, not a regular file; put the model's own file there")
