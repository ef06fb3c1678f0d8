"""The file that answers are appended to, a whole line each, and what an earlier run left in it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from lamella.batch_files.input_rows import digest, key_of
from lamella.errors import ConfigError
from lamella.text_lines import place

try:
    import fcntl
except ImportError:  # where there is none, nothing keeps two runs apart
    fcntl = None  # type: ignore[assignment]


class OutputRows:
    """Open for one process at a time. done: digests of the keys of the rows that are there.

    A row is handed to the operating system before `write` returns, so that what a killed process has written stays. The
    file may then end within a line: opening cuts that off, and its row is written again. Raises ConfigError where the
    file holds anything but answers to rows whose keys have the digests `known`.
    """

    def __init__(self, path: Path, known: Collection[bytes], *, overwrites: bool) -> None:
        self._path = path
        self.done: set[bytes] = set()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); give another file") from error
        try:
            self._lock()
            if overwrites:
                os.ftruncate(self._file, 0)
            self._cut_torn_line()
            self._read_done(known)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written on ({error}); the same command goes on where this one ended"
            ) from error

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a pipe or a device
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> OutputRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path} is being written by another run; wait for it, or give another file"
            ) from None
        except OSError:
            pass  # some file systems have no locks

    def _cut_torn_line(self) -> None:
        end = size = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - 65_536)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)

    def _read_done(self, known: Collection[bytes]) -> None:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = place(self._path, number)
                instead = "give another file, or --overwrite to begin anew"
                try:
                    row = json.loads(line)
                    custom_id = row.get("custom_id")
                    key = digest(key_of(custom_id, row["line"] if custom_id is None else 0))
                except (ValueError, KeyError, AttributeError, RecursionError):
                    raise ConfigError(f"{where} is no row of an earlier run; {instead}") from None
                if key not in known:
                    raise ConfigError(f"{where} answers a row that the input has not; {instead}")
                if key in self.done:
                    raise ConfigError(f"{where} answers a row that an earlier line answers; {instead}")
                self.done.add(key)
