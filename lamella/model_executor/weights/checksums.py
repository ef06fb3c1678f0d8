"""Whether a file still holds what was written: looked at once after each start of the machine.

The checksum of `x` lies beside it in `x.sum`, in a folder that only the user can write, and is itself trusted only
where it is the user's. It also remembers the boot in which the content was last compared, and the file's inode, size
and times then: while these are the same, nothing is read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lamella.model_executor.weights.cache_parts import locked_part
from lamella.model_executor.weights.cache_trust import distrust

logger = logging.getLogger(__name__)

SUM_SUFFIX = ".sum"
_BLOCK_BYTES = 8 << 20  # hashed by one thread
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write_sum(path: Path, *, content: Path | None = None, sources: Sequence[str] = ()) -> None:
    """Note the checksum of the file at `path`, as compared in this boot; `content`: of that file, which is about to
    be renamed to it and was made from `sources`. Raises OSError."""
    noted = read_sum(path) if content is None else None
    if noted is None:
        noted = {"sha256": content_digest(content or path), "sources": list(sources)}
    compared = {} if content is not None else {"boot_id": boot_id(), "state": _state(path)}
    handle, temp_name = locked_part(path)
    try:
        Path(temp_name).write_text(json.dumps(noted | compared))
        os.replace(temp_name, path.with_name(path.name + SUM_SUFFIX))
    except BaseException:
        with suppress(OSError):
            os.unlink(temp_name)
        raise
    finally:
        os.close(handle)


def check_sum(path: Path) -> bool:
    """Whether the file at `path` holds what was written. Where it was compared in this boot and is unchanged since, its
    content is not read."""
    noted = read_sum(path)
    if noted is None:
        logger.info("%s has no checksum and will be made anew", path)
        return False
    try:
        state = _state(path)
        if noted.get("boot_id") == boot_id() != "" and noted.get("state") == state:
            return True
        logger.info("comparing %s with its checksum, once after each start of the machine", path)
        if content_digest(path) != noted["sha256"]:
            logger.warning("%s is damaged: its checksum does not hold; it will be made anew", path)
            return False
    except OSError as error:
        logger.info("%s cannot be read and will be made anew: %s", path, error)
        return False
    with suppress(OSError):  # a folder that cannot be written now only means another comparison next time
        write_sum(path)
    return True


def content_digest(path: Path) -> str:
    """sha256 of the sha256s of the file's blocks, by as many threads as help."""
    starts = range(0, max(1, path.stat().st_size), _BLOCK_BYTES)

    def block_digest(start: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            block = bytearray(_BLOCK_BYTES)
            num_bytes = 0
            while num_bytes < _BLOCK_BYTES and (read := file.readinto(memoryview(block)[num_bytes:])):
                num_bytes += read
        return hashlib.sha256(memoryview(block)[:num_bytes]).digest()

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(block_digest, starts))).hexdigest()


def boot_id() -> str:
    """An id of this run of the operating system; "" where there is none, so that files are compared each time."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def read_sum(path: Path) -> dict[str, Any] | None:
    """What is noted about `path`; None where nothing is, or nothing that can be trusted."""
    noted = path.with_name(path.name + SUM_SUFFIX)
    try:
        if distrust(noted) is not None:
            return None
        document = json.loads(noted.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and isinstance(document.get("sha256"), str) else None
