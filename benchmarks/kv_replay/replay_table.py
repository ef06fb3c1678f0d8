"""The table of replays: every trace and layout at every budget under every system."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kv_replay import drive, vllm_process
from kv_replay.jobs import Job, result_of
from kv_replay.layouts import full_token_bytes, layer_specs
from kv_replay.results import Cell, Outcome, Result
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import TraceRequest, load_trace
from lamella.errors import ConfigError
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTable:
    """skip_requests: leave out so many first requests, of those that the other options let through.
    budgets: each in full-attention KV of so many mean requests.
    variants: policies and intervals to compare. vLLM has its own and runs once, with the other limits of the first.
    vllm_python: the interpreter that has vLLM.
    """

    traces: tuple[str, ...]
    trace_dir: str | None
    num_requests: int
    skip_requests: int = 0
    scale: float = 1.0
    max_total_tokens: int | None = None
    num_sessions: int = 25
    layouts: tuple[str, ...]
    budgets: tuple[float, ...]
    systems: tuple[System, ...]
    variants: tuple[Limits, ...]
    vllm_python: str | None = None

    def requests(self, trace: str) -> list[TraceRequest]:
        """Raises ConfigError where the trace has none that fit the options."""
        requests = load_trace(
            trace,
            self.trace_dir,
            num_requests=self.skip_requests + self.num_requests,
            scale=self.scale,
            max_total_tokens=self.max_total_tokens,
        )[self.skip_requests :]
        if not requests:
            raise ConfigError(
                f"trace {trace!r} has no request after the first {self.skip_requests} that is within "
                f"max_total={self.max_total_tokens}; skip fewer or allow longer ones"
            )
        return requests


def budget_in_bytes(budget_requests: float, requests: list[TraceRequest], specs: list[KVCacheSpec]) -> int:
    """Full-attention KV of `budget_requests` requests of mean length, prompt and output."""
    mean_tokens = sum(request.num_tokens for request in requests) / len(requests)
    return int(budget_requests * mean_tokens * full_token_bytes(specs))


def replay_jobs(table: ReplayTable) -> list[Job]:
    """One job per trace, layout, budget, system and variant. Raises what `ReplayTable.requests` does."""
    jobs: list[Job] = []
    for trace in table.traces:
        requests = table.requests(trace)
        for layout in table.layouts:
            for budget in table.budgets:
                budget_bytes = budget_in_bytes(budget, requests, layer_specs(layout))
                for system in table.systems:
                    for limits in system.variants(table.variants):
                        cell = Cell(
                            trace=trace,
                            layout=layout,
                            budget_requests=budget,
                            budget_bytes=budget_bytes,
                            system=system.name,
                            **system.labels(limits),
                        )
                        jobs.append(partial(_run, table, cell, system, limits))
    return jobs


def _run(table: ReplayTable, cell: Cell, system: System, limits: Limits) -> Result:
    return result_of(cell, partial(_replay, table, cell, system, limits))


def _replay(table: ReplayTable, cell: Cell, system: System, limits: Limits) -> Outcome:
    # Read again, in whichever process this is: a tenth of a second.
    requests = table.requests(cell.trace)
    specs = layer_specs(cell.layout)
    max_model_len = limits.whole_pages(max(request.num_tokens for request in requests))
    memory = {"budget_bytes": cell.budget_bytes, "max_model_len": max_model_len}
    if system.is_vllm:
        return vllm_process.replay(
            table.vllm_python, system, specs, limits, requests, num_sessions=table.num_sessions, **memory
        )
    scheduler = build_scheduler(system, specs, limits, **memory)
    return drive.replay(
        scheduler,
        requests,
        num_sessions=table.num_sessions,
        budget_bytes=cell.budget_bytes,
        tells_boundaries=system.kind == "hinted",
    )
