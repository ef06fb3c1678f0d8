"""The runs of a table, one after the other or several at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeAlias

from kv_replay.results import Cell, Outcome, Refusal, Result
from lamella.errors import CapacityError

Job: TypeAlias = Callable[[], Result]


def run_jobs(jobs: Sequence[Job], num_processes: int = 1) -> Iterator[Result]:
    """Results in the order of `jobs`, as they come.

    num_processes: how many run at a time, each in a process of its own; jobs are pickled for that. Processes share
    caches and memory bandwidth, so host times are longer and less steady. What a job raises is raised here.
    """
    if num_processes == 1:
        for job in jobs:
            yield job()
        return
    # Not forked: libraries that are loaded here may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(_call, jobs)


def result_of(cell: Cell, run: Callable[[], Outcome]) -> Result:
    """What `run` returns; memory that is too small is a refusal."""
    try:
        return Result(cell, run())
    except CapacityError as error:
        return Result(cell, Refusal(str(error)))


def _call(job: Job) -> Result:
    return job()
