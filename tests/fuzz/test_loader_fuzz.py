"""Thousands of damaged models: each is refused with ModelLoadError, or loads as other readers say it is."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.bases import write_bases
from tests.fuzz.mutations import FORMATS

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKERS = 2
LOAD_SECONDS = 5.0
OTHER_SECONDS = 60.0  # for readers that are not under test


class Worker:
    """One process; a mutant that ends it is a failure, and the next one gets a new process."""

    def __init__(self, base: Path, scratch: Path) -> None:
        self._arguments = [sys.executable, "-m", "tests.fuzz.worker", str(base), str(scratch)]
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
        self._wait_until(OTHER_SECONDS)

    def _wait_until(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    @property
    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def give(self, number: int) -> None:
        assert self._process.stdin is not None
        self.number, self.note = number, "being made"
        self._process.stdin.write(f"{number}\n".encode())
        self._wait_until(OTHER_SECONDS)

    def messages(self) -> list[dict[str, Any]]:
        """What has arrived; the worker may have ended."""
        arrived = os.read(self.fileno, 1 << 16)
        if not arrived:
            raise EOFError
        *lines, self._pending = (self._pending + arrived).split(b"\n")
        return [json.loads(line) for line in lines]

    def heard(self, message: dict[str, Any]) -> None:
        if "trying" in message:
            self.note = message["trying"]
            # Starting the load counts; a busy machine may take a while to schedule it.
            self._wait_until(LOAD_SECONDS)
        elif "seconds" in message:
            self._wait_until(OTHER_SECONDS)

    def restart(self) -> int | None:
        self._process.kill()
        code = self._process.wait()
        self._start()
        return code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stderr.close()


def run_mutants(numbers: list[int], folder: Path) -> tuple[list[str], Counter[tuple[str, str]]]:
    """Failures in words, and how many mutants of each format were loaded and refused."""
    base = folder / "base"
    write_bases(base)
    workers = [Worker(base, folder / f"worker{index}") for index in range(NUM_WORKERS)]
    waiting = numbers[::-1]
    failures: list[str] = []
    outcomes: Counter[tuple[str, str]] = Counter()
    busy = set(workers)
    try:
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
                        worker.heard(message)
                        if "outcome" in message:
                            outcomes[FORMATS[message["number"] % len(FORMATS)], message["outcome"]] += 1
                            if message["problem"]:
                                failures.append(f"{message['number']} ({worker.note}): {message['problem']}")
                        if "outcome" in message or "ready" in message:
                            if waiting:
                                worker.give(waiting.pop())
                            else:
                                busy.discard(worker)
                elif time.monotonic() > worker.deadline:
                    problem = "took too long"
                if problem:
                    number, note = worker.number, worker.note
                    code = worker.restart()
                    failures.append(f"{number} ({note}): {problem}, exit {code}")
                    assert number is not None, f"a worker could not start: {folder}"
    finally:
        for worker in workers:
            worker.close()
    return failures, outcomes


def check(numbers: list[int], folder: Path) -> None:
    failures, outcomes = run_mutants(numbers, folder)
    told = "\n".join(failures[:40])
    assert not failures, f"{len(failures)} of {len(numbers)} mutants:\n{told}"
    assert sum(outcomes.values()) == len(numbers)
    for kind in FORMATS:  # a format whose mutants are all refused, or none, tests nothing
        assert outcomes[kind, "loaded"] > len(numbers) // 200, outcomes
        assert outcomes[kind, "refused"] > len(numbers) // 200, outcomes


def test_mutants_are_refused_or_right(tmp_path):
    check(list(range(2_000)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_mutants_are_refused_or_right(tmp_path):
    check(list(range(2_000, 22_000)), tmp_path)
