"""The other workers of an engine whose layers several processes compute together, as the engine sees them.

The engine's own process is worker 0: it schedules, and samples. Whatever waits for another worker waits for a bounded
time, and learns of a worker's end at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lamella.distributed.worker_channel import Channel, WorkerFailedError
from lamella.errors import LamellaError, WorkerLostError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOAD_SECONDS = 600.0  # beyond the engine's own loading
_ENDING_SECONDS = 5.0  # for a worker to end by itself
_LAST_WORDS_SECONDS = 2.0
_POLL_SECONDS = 0.02
_WORKER_CODE = "from lamella.distributed.worker_process import main; main()"


class WorkerHandle(Protocol):
    """A worker's process, wherever it is."""

    def exit_reason(self) -> str | None:
        """How it ended; None: it has not, as far as is known."""
        ...

    def end(self, seconds: float) -> None:
        """Give it so long to end by itself, now that its channel is closed, and then end it. Twice is fine."""
        ...


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """rank: from 1."""

    rank: int
    handle: WorkerHandle
    channel: Channel


class Workers:
    """The workers 1 to T - 1. `send` and `agree` raise WorkerLostError where one is gone, after which none is left."""

    def __init__(self, started: Sequence[StartedWorker], folder: Path, *, timeout_seconds: float) -> None:
        """folder: where they meet, which nobody else can read; it is removed in the end."""
        self._started = tuple(started)
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self._end: str | None = None

    @property
    def num_workers(self) -> int:
        """T: with the engine's own."""
        return len(self._started) + 1

    def send(self, message: bytes) -> None:
        """To all of them."""
        self._require_all()
        try:
            for worker in self._started:
                worker.channel.send(message)
        except OSError as error:
            raise self.lost(error) from error

    def agree(self, number: int) -> int:
        """The smallest of what all workers say, which each then learns."""
        self._require_all()
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            agreed = min(number, *(worker.channel.receive_number(deadline) for worker in self._started))
            for worker in self._started:
                worker.channel.send_number(agreed)
        except (OSError, EOFError, WorkerFailedError) as error:
            raise self.lost(error) from error
        return agreed

    def watched(self, wait: Callable[[], Result]) -> Result:
        """What `wait` returns, which may wait for workers with nobody to tell it that they are gone."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(wait())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="lamella-joining", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if any(worker.handle.exit_reason() is not None for worker in self._started) and thread.is_alive():
                raise self.lost(None)
        if errors:
            raise self.lost(errors[0]) from errors[0]
        return results[0]

    def lost(self, error: BaseException | None) -> WorkerLostError:
        """Ends what is left of the workers. Returns the error to raise, which says what ended the first of them.
        error: what was noticed of it."""
        if self._end is None:
            self._end = self._find_reason(error)
            self._close()
        return WorkerLostError(f"{self._end}; the engine has ended, make a new one")

    def close(self) -> None:
        """End them all. Closing twice is fine."""
        if self._end is None:
            self._end = "the workers were ended"
        self._close()

    def _close(self) -> None:
        for worker in self._started:
            worker.channel.close()
        deadline = time.monotonic() + _ENDING_SECONDS
        for worker in self._started:
            worker.handle.end(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _require_all(self) -> None:
        if self._end is not None:
            raise WorkerLostError(f"{self._end}; the engine has ended, make a new one")

    def _find_reason(self, error: BaseException | None) -> str:
        """The first worker's end that is known, its own words first; else what was noticed."""
        if error is not None and not isinstance(error, (LamellaError, OSError, EOFError, WorkerFailedError)):
            return f"the workers were left in the middle of a step by {type(error).__name__}: {error}"
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        if isinstance(error, WorkerFailedError):
            return f"one of {self.num_workers} tensor-parallel workers ended: {error}"
        while True:
            ends = [(worker, worker.handle.exit_reason()) for worker in self._started]
            killed = [(worker.rank, reason) for worker, reason in ends if reason is not None]
            said = [(worker.rank, worker.channel.last_words()) for worker in self._started]
            # Those that only lost the others say so, and are not the reason.
            for rank, reason in [*((rank, words) for rank, words in said if words), *killed]:
                if reason is not None and not reason.startswith(WorkerLostError.__name__):
                    return f"tensor-parallel worker {rank} of {self.num_workers} ended: {reason}"
            if time.monotonic() > deadline:
                noticed = f" ({error})" if error is not None else ""
                return f"a tensor-parallel worker of {self.num_workers} does not answer{noticed}"
            time.sleep(_POLL_SECONDS)


class _Process:
    """A process of this machine. Its standard input is a pipe that it watches: it ends when the engine's process
    does."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    def exit_reason(self) -> str | None:
        code = self._popen.poll()
        if code is None:
            return None
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return f"its process exited with {code}"

    def end(self, seconds: float) -> None:
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def meeting_folder() -> Path:
    """A new folder that only this user can read."""
    return Path(tempfile.mkdtemp(prefix="lamella-workers-"))


def start_processes(settings: dict[str, Any], num_workers: int, timeout_seconds: float) -> Workers:
    """New interpreters of this machine, which import nothing of the caller's script, so that it needs no guard of its
    main module. settings: what `worker_process.serve` takes beside the rank."""
    folder = meeting_folder()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits leaves its core to other workers'
    started: list[StartedWorker] = []
    try:
        for rank in range(1, num_workers):
            own, others = Pipe(duplex=True)
            assert isinstance(own, Connection)
            popen = subprocess.Popen(
                [sys.executable, "-c", _WORKER_CODE, str(others.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(others.fileno(),),
                env=environment,
                start_new_session=True,  # Ctrl-C is the engine's to handle
            )
            others.close()
            channel = Channel(own, send_seconds=timeout_seconds)
            started.append(StartedWorker(rank, _Process(popen), channel))
            channel.send_settings({**settings, "rank": rank, "num_workers": num_workers, "folder": str(folder)})
    except BaseException:
        Workers(started, folder, timeout_seconds=timeout_seconds).close()
        raise
    return Workers(started, folder, timeout_seconds=timeout_seconds)
