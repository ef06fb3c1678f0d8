"""An engine in a process of its own, asked and answering in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.errors import LamellaError

LOG_TAIL_BYTES = 3000
STOP_SECONDS = 20


class WorkerError(LamellaError):
    """A worker that cannot be started, died, hung, or answered something else than it was asked for."""


class Worker:
    """A started process. A context manager: leaving it ends the process and all that it started.

    name: for messages. command: program and arguments. environment: of the process, whole.
    timeout_seconds: longest wait for one answer.
    Standard error goes to a log, the end of which is part of every WorkerError.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float
    ) -> None:
        self.name = name
        self._timeout_seconds = timeout_seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._unread = b""
        self.start_time = time.perf_counter()
        try:
            # A group of its own: engines start processes, which must not outlive them.
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name}: {command[0]} cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)

    def ask(self, question: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """The object that the worker answers `question` with. `doing` says in errors what it was at.

        Raises WorkerError when the process ends, does not answer in time, or answers no JSON object.
        """
        line = self._exchange(json.dumps(question).encode() + b"\n", doing)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(f"answered {line[:200]!r} while {doing}, which is no JSON object")
        return answer

    def close(self) -> None:
        """End the process: a closed standard input asks it to, and what is left after a while is killed."""
        self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._kill()
        self._stdout.close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._kill()  # it may be stuck: no use in asking
        self.close()

    def _exchange(self, data: bytes, doing: str) -> bytes:
        """Write `data` and read a line, as the pipes allow: prompts are longer than a pipe holds."""
        deadline = time.perf_counter() + self._timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while b"\n" not in self._unread:
                ready = selector.select(max(0.0, deadline - time.perf_counter()))
                if not ready:
                    self._kill()
                    raise self._error(f"did not answer within {self._timeout_seconds:g} s while {doing}")
                for key, _ in ready:
                    if key.fileobj is self._stdin:
                        try:
                            data = data[os.write(self._stdin.fileno(), data) :]
                        except BrokenPipeError:
                            data = b""  # it has ended: the other pipe says so, too
                        if not data:
                            selector.unregister(self._stdin)
                        continue
                    chunk = os.read(self._stdout.fileno(), 1 << 16)
                    if not chunk:
                        raise self._death(doing)
                    self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self, doing: str) -> WorkerError:
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._error(f"closed its output while {doing}")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self._error(f"{how} while {doing}")

    def _error(self, what: str) -> WorkerError:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = self._log.read().decode("utf-8", "replace").strip()
        return WorkerError(f"{self.name}: the worker {what}; " + (f"its log ends:\n{tail}" if tail else "no log"))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
