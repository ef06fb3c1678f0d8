"""Gives mutants to worker processes and gathers what they find, whatever becomes of the processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fuzz.bases import write_bases
from tests.fuzz.mutations import format_of

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKERS = 2
# A load may take this much processor time, which other processes of a busy machine do not add to; one that waits for
# something takes none, and is ended after BLOCKED_SECONDS.
LOAD_SECONDS = 5.0
BLOCKED_SECONDS = 60.0
OTHER_SECONDS = 120.0  # for starting, and for readers that are not under test


class Worker:
    """One process; a mutant that ends it is a failure, and the next one gets a new process."""

    def __init__(self, base: Path, scratch: Path, faults: Mapping[int, str]) -> None:
        self._arguments = [
            *(sys.executable, "-m", "tests.fuzz.worker", str(base), str(scratch)),
            json.dumps({str(number): fault for number, fault in faults.items()}),
        ]
        scratch.mkdir(exist_ok=True)
        self._stderr = (scratch / "stderr.txt").open("wb")
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            self._arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=environment, bufsize=0,
        )  # fmt: skip
        self._pending = b""
        self.number: int | None = None
        self.note = "starting"
        self._allow(OTHER_SECONDS)

    def _allow(self, wall_seconds: float, processor_seconds: float | None = None) -> None:
        self._wall_end = time.monotonic() + wall_seconds
        self._processor_end = None if processor_seconds is None else self._processor_seconds() + processor_seconds

    def _processor_seconds(self) -> float:
        # The fields after the name, which may itself hold spaces and brackets; user and system time are 14 and 15.
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def is_late(self) -> bool:
        if time.monotonic() > self._wall_end:
            return True
        return self._processor_end is not None and self._processor_seconds() > self._processor_end

    @property
    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def begin(self) -> None:
        """The base folder is there."""
        self._write("begin")
        self._allow(OTHER_SECONDS)

    def give(self, number: int) -> None:
        self.number, self.note = number, "being made"
        self._write(str(number))
        self._allow(OTHER_SECONDS)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def messages(self) -> list[dict[str, Any]]:
        """What has arrived; the worker may have ended."""
        arrived = os.read(self.fileno, 1 << 16)
        if not arrived:
            raise EOFError
        *lines, self._pending = (self._pending + arrived).split(b"\n")
        return [json.loads(line) for line in lines]

    def heard(self, message: dict[str, Any], load_seconds: float, blocked_seconds: float) -> None:
        if "trying" in message:
            self.note = message["trying"]
            self._allow(blocked_seconds, load_seconds)
        elif "seconds" in message:
            self._allow(OTHER_SECONDS)

    def restart(self) -> int:
        self._process.kill()
        code = self._process.wait()
        self._start()
        self.begin()
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stderr.close()


def run_mutants(
    numbers: list[int],
    folder: Path,
    *,
    faults: Mapping[int, str] | None = None,
    load_seconds: float = LOAD_SECONDS,
    blocked_seconds: float = BLOCKED_SECONDS,
) -> tuple[dict[int, str], Counter[tuple[str, str]]]:
    """Failures in words by number, and how many mutants of each format were loaded, refused or neither.

    faults: number -> a fault of `planted.py` that the worker commits at that mutant.
    """
    base = folder / "base"
    # Workers import while the base is written.
    workers = [Worker(base, folder / f"worker{index}", faults or {}) for index in range(NUM_WORKERS)]
    waiting = numbers[::-1]
    failures: dict[int, str] = {}
    outcomes: Counter[tuple[str, str]] = Counter()
    busy = set(workers)
    try:
        write_bases(base)
        for worker in workers:
            worker.begin()
        while busy:
            ready, _, _ = select.select([worker.fileno for worker in busy], [], [], 0.2)
            for worker in list(busy):
                problem = None
                if worker.fileno in ready:
                    try:
                        messages = worker.messages()
                    except EOFError:
                        problem, messages = "ended the process", []
                    for message in messages:
                        worker.heard(message, load_seconds, blocked_seconds)
                        if "outcome" in message:
                            number = message["number"]
                            outcomes[format_of(number), message["outcome"]] += 1
                            if message["problem"]:
                                failures[number] = f"({worker.note}): {message['problem']}"
                        if "outcome" in message or "ready" in message:
                            if waiting:
                                worker.give(waiting.pop())
                            else:
                                busy.discard(worker)
                elif worker.is_late:
                    problem = "took too long"
                if problem:
                    assert worker.number is not None, f"a worker could not start, see stderr.txt in {folder}"
                    number, note = worker.number, worker.note
                    failures[number] = f"({note}): {problem}, exit {worker.restart()}"
    finally:
        for worker in workers:
            worker.close()
    return failures, outcomes
