"""What one system did on one workload."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias


class Place(NamedTuple):
    """Where systems are compared. budget_requests: the budget in mean requests, None for ample memory."""

    trace: str
    layout: str
    budget_requests: float | None

    def __str__(self) -> str:
        return f"{self.trace}, {self.layout}, {budget_name(self.budget_requests)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where a result stands in the table. repeat: which of several runs of the same, from 0.

    policy, interval_tokens: as asked for; vLLM's are its own, "fcfs" and None.
    """

    trace: str
    layout: str
    budget_requests: float | None
    budget_bytes: int
    policy: str
    interval_tokens: int | None
    system: str
    repeat: int = 0

    @property
    def place(self) -> Place:
        return Place(self.trace, self.layout, self.budget_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """num_prompt_tokens: of all requests, each counted once.
    hit_share: prompt tokens not computed when a request first runs / prompt tokens.
    prefill_tokens_computed: all tokens computed but one decode step per output token, so recomputation after a
        preemption and the replay of windows are in it.
    host_us_per_step_*: microseconds of schedule and update together, without the executor.
    add_us_p50: microseconds to take in one request, which is in no step's time. vLLM hashes the prompt then.
    mean_running, max_running: requests in the running batch, per step.
    wait_steps_*: steps from a request's arrival to the first that runs it.
    chunk_tokens, used_interval_tokens: what the memory allowed of those that were asked for.
    peak_bytes: per group, most bytes that requests owned at once.
    unusable_bytes_share: bytes that are in no use and that the group worst off could not take / budget, mean over
        steps. Slab waste, free pages in other groups' slabs and other groups' idle quotas are such bytes.
    windowed_bytes_mean: bytes of windowed groups that requests own, mean over steps.
    windowed_held_over_ideal: the same / window bytes of the running requests, each averaged over steps.
    None: not known for this system.
    """

    num_prompt_tokens: int
    hit_share: float
    prefill_tokens_computed: int
    steps: int
    mean_running: float
    max_running: int
    preemptions: int
    host_us_per_step_p50: float
    host_us_per_step_min: float
    host_us_per_step_mean: float
    add_us_p50: float
    wait_steps_p50: float
    wait_steps_max: int
    chunk_tokens: int
    used_interval_tokens: int | None
    peak_bytes: dict[str, int]
    unusable_bytes_share: float | None
    windowed_bytes_mean: float | None
    windowed_held_over_ideal: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCost:
    """Host time, in microseconds, of taking in prompts that nothing cached begins, each computed in one step in
    which nothing else runs. total is add + schedule + update of a prompt; medians over `prompts` prompts.
    cache_us_p50: of that, looking it up in the prefix cache and entering its blocks; None where nobody measured it."""

    prompts: int
    add_us_p50: float
    schedule_us_p50: float
    update_us_p50: float
    total_us_p50: float
    total_us_min: float
    cache_us_p50: float | None = None

    @classmethod
    def of(
        cls, seconds: Sequence[tuple[float, float, float]], cache_seconds: Sequence[float] | None = None
    ) -> PromptCost:
        """seconds: (add, schedule, update) of each prompt. cache_seconds: of each, what the prefix cache took."""
        totals = [1e6 * sum(parts) for parts in seconds]
        add, schedule, update = (1e6 * statistics.median(part) for part in zip(*seconds, strict=True))
        return cls(
            prompts=len(seconds),
            add_us_p50=add,
            schedule_us_p50=schedule,
            update_us_p50=update,
            total_us_p50=statistics.median(totals),
            total_us_min=min(totals),
            cache_us_p50=None if cache_seconds is None else 1e6 * statistics.median(cache_seconds),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The workload cannot run: why not, in the system's own words."""

    refused: str


Outcome: TypeAlias = Measurements | PromptCost | Refusal


@dataclass(frozen=True, slots=True)
class Result:
    cell: Cell
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.cell), **asdict(self.outcome)}


def budget_name(budget_requests: float | None) -> str:
    return "ample" if budget_requests is None else f"x{budget_requests:g}"


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
