"""Runs the table: every layout at every budget under every system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lamella.benchmark.kv_replay import drive, vllm_process
from lamella.benchmark.kv_replay.layouts import full_token_bytes, layer_specs
from lamella.benchmark.kv_replay.results import Cell, Measurements, Refusal, Result
from lamella.benchmark.kv_replay.systems import Limits, System, build_scheduler
from lamella.benchmark.kv_replay.traces import TraceRequest, load_trace
from lamella.errors import CapacityError, ConfigError
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.sizing import request_slabs
from lamella.kv_cache.spec import KVCacheSpec, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTable:
    """budgets: each in full-attention KV of so many mean requests. skip_requests: leave out so many first requests.
    vllm_python: the interpreter that has vLLM."""

    trace: str
    trace_dir: str
    num_requests: int
    skip_requests: int = 0
    scale: float = 1.0
    max_total_tokens: int | None = None
    num_sessions: int = 25
    layouts: tuple[str, ...]
    budgets: tuple[float, ...]
    systems: tuple[System, ...]
    limits: Limits
    vllm_python: str | None = None

    def requests(self) -> list[TraceRequest]:
        """Raises ConfigError where the trace has none that fit the options."""
        requests = load_trace(
            self.trace,
            self.trace_dir,
            num_requests=self.skip_requests + self.num_requests,
            scale=self.scale,
            max_total_tokens=self.max_total_tokens,
        )[self.skip_requests :]
        if not requests:
            raise ConfigError(
                f"trace {self.trace!r} has no request after the first {self.skip_requests} that is within "
                f"max_total={self.max_total_tokens}; skip fewer or allow longer ones"
            )
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTable:
    """num_requests requests of context_tokens each decode num_steps steps, in memory that holds them all."""

    num_requests: int
    context_tokens: int
    num_steps: int
    layouts: tuple[str, ...]
    systems: tuple[System, ...]
    limits: Limits
    vllm_python: str | None = None

    @property
    def max_model_len(self) -> int:
        output_tokens = drive.decode_output_tokens(self.num_requests, self.num_steps)
        return _whole_pages(self.context_tokens + output_tokens, self.limits)


def budget_in_bytes(budget_requests: float, requests: list[TraceRequest], specs: list[KVCacheSpec]) -> int:
    """Full-attention KV of `budget_requests` requests of mean length, prompt and output."""
    mean_tokens = sum(request.num_tokens for request in requests) / len(requests)
    return int(budget_requests * mean_tokens * full_token_bytes(specs))


def run_replays(table: ReplayTable) -> Iterator[Result]:
    """One result per layout, budget and system, as they come."""
    requests = table.requests()
    for layout in table.layouts:
        for budget in table.budgets:
            budget_bytes = budget_in_bytes(budget, requests, layer_specs(layout))
            for system in table.systems:
                cell = Cell(
                    trace=table.trace,
                    layout=layout,
                    budget_requests=budget,
                    budget_bytes=budget_bytes,
                    policy=table.limits.policy,
                    system=system.name,
                )
                yield _result(cell, partial(_replay, table, requests, cell, system))


def _replay(table: ReplayTable, requests: list[TraceRequest], cell: Cell, system: System) -> Measurements | Refusal:
    specs = layer_specs(cell.layout)
    max_model_len = _whole_pages(max(request.num_tokens for request in requests), table.limits)
    memory = {"budget_bytes": cell.budget_bytes, "max_model_len": max_model_len}
    if system.is_vllm:
        return vllm_process.replay(
            table.vllm_python, system, specs, table.limits, requests, num_sessions=table.num_sessions, **memory
        )
    scheduler = build_scheduler(system, specs, table.limits, **memory)
    return drive.replay(scheduler, requests, num_sessions=table.num_sessions, budget_bytes=cell.budget_bytes)


def run_decodes(table: DecodeTable) -> Iterator[Result]:
    """One result per layout and system, as they come."""
    for layout in table.layouts:
        for system in table.systems:
            cell = Cell(
                trace=f"decode {table.num_requests} x {table.context_tokens}",
                layout=layout,
                budget_requests=None,
                budget_bytes=_ample_bytes(table, layer_specs(layout), system),
                policy=table.limits.policy,
                system=system.name,
            )
            yield _result(cell, partial(_decode, table, cell, system))


def _decode(table: DecodeTable, cell: Cell, system: System) -> Measurements | Refusal:
    specs = layer_specs(cell.layout)
    memory = {"budget_bytes": cell.budget_bytes, "max_model_len": table.max_model_len}
    sizes = {
        "num_requests": table.num_requests,
        "context_tokens": table.context_tokens,
        "num_steps": table.num_steps,
    }
    if system.is_vllm:
        return vllm_process.decode_only(table.vllm_python, system, specs, table.limits, **sizes, **memory)
    scheduler = build_scheduler(system, specs, table.limits, **memory)
    return drive.decode_only(scheduler, budget_bytes=cell.budget_bytes, **sizes)


def check_json_path(path: str | None) -> None:
    """Raise ConfigError now rather than after the run."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"output_json={path!r}: its folder does not exist; create it first")


def _result(cell: Cell, run: Callable[[], Measurements | Refusal]) -> Result:
    try:
        return Result(cell, run())
    except CapacityError as error:
        return Result(cell, Refusal(str(error)))


def _whole_pages(num_tokens: int, limits: Limits) -> int:
    return ceil_div(num_tokens, limits.page_tokens) * limits.page_tokens


def _ample_bytes(table: DecodeTable, specs: list[KVCacheSpec], system: System) -> int:
    """Twice what the requests hold if each of them had a whole chunk in flight; with fixed pools or without
    windows, as if every layer kept everything."""
    keeps_all = system.kind in ("split", "hybrid-off")
    layout = build_layout(without_sliding(specs) if keeps_all else specs, page_tokens=table.limits.page_tokens)
    slabs = request_slabs(
        layout,
        max_model_len=table.max_model_len,
        chunk_tokens=table.limits.max_num_batched_tokens,
        interval_tokens=table.limits.interval_tokens or table.limits.page_tokens,
    )
    return 2 * (1 + slabs * table.num_requests) * layout.slab_bytes
