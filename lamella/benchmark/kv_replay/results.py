"""What one system did on one workload."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where a result stands in the table. budget_requests: the budget in mean requests, None for pure decode."""

    trace: str
    layout: str
    budget_requests: float | None
    budget_bytes: int
    policy: str
    system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """hit_share: prompt tokens not computed when a request first runs / prompt tokens.
    prefill_tokens_computed: all tokens computed but one decode step per output token, so recomputation after a
        preemption and the replay of windows are in it.
    host_us_per_step_*: microseconds of schedule and update together, without the executor.
    mean_running, max_running: requests in the running batch, per step.
    wait_steps_*: steps from a request's arrival to the first that runs it.
    peak_bytes: per group, most bytes that requests owned at once.
    unusable_bytes_share: bytes that are in no use and that the group worst off could not take / budget, mean over
        steps. Slab waste, free pages in other groups' slabs and other groups' idle quotas are such bytes.
    windowed_held_over_ideal: bytes of windowed groups that requests own / window bytes of the running requests, each
        averaged over steps.
    None: not known for this system.
    """

    hit_share: float
    prefill_tokens_computed: int
    steps: int
    mean_running: float
    max_running: int
    preemptions: int
    host_us_per_step_p50: float
    host_us_per_step_min: float
    host_us_per_step_mean: float
    wait_steps_p50: float
    wait_steps_max: int
    chunk_tokens: int
    peak_bytes: dict[str, int]
    unusable_bytes_share: float | None
    windowed_held_over_ideal: float | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The workload cannot run: why not, in the system's own words."""

    refused: str


@dataclass(frozen=True, slots=True)
class Result:
    cell: Cell
    outcome: Measurements | Refusal

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.cell), **asdict(self.outcome)}


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
