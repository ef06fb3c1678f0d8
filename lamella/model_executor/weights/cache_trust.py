"""Whether a file in the cache is the user's own. With weights that somebody else wrote, the model would say what they
want.

A file, its folder and the cache folder must belong to the user and not be writable by others. The cache folder itself
may be reached through symbolic links, as where ~/.cache lies on another disk; below it there are none.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust(path: Path) -> str | None:
    """Why the file at `path`, two folders below whoever owns the cache, is not to be trusted; None: it is.

    Raises OSError where one of them is not there.
    """
    folder = path.parent
    return (
        _problem(folder.parent.resolve(), stat.S_IFDIR, stat.S_IWOTH)
        or _problem(folder, stat.S_IFDIR, _WRITABLE_BY_OTHERS)
        or _problem(path, stat.S_IFREG, _WRITABLE_BY_OTHERS)
    )


def own_folder(folder: Path) -> None:
    """Make `folder`, and the cache folder it lies in, where they are not there: for the user alone.

    A folder that the user made writable for others is closed to them; entries that lie in it are checked one by one.
    Raises OSError where either folder is not the user's.
    """
    base = folder.parent
    for one in (base, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _user() is not None and not folder.is_symlink() and folder.stat().st_uid == _user():
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _WRITABLE_BY_OTHERS:
            folder.chmod(mode & ~_WRITABLE_BY_OTHERS)
    problem = _problem(base.resolve(), stat.S_IFDIR, stat.S_IWOTH) or _problem(folder, stat.S_IFDIR, 0)
    if problem is not None:
        raise OSError(errno.EPERM, problem)


def _user() -> int | None:
    """The user's number; None on systems where files have no such owners."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _problem(path: Path, kind: int, forbidden_mode: int) -> str | None:
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        return f"{path} is a symbolic link"
    if stat.S_IFMT(state.st_mode) != kind:
        return f"{path} is not a {'folder' if kind == stat.S_IFDIR else 'plain file'}"
    if _user() is None:
        return None
    if state.st_uid != _user():
        return f"{path} belongs to another user (uid {state.st_uid}, not {_user()})"
    if state.st_mode & forbidden_mode:
        return f"{path} can be written by others (mode {stat.S_IMODE(state.st_mode):o}); chmod go-w would close it"
    return None
