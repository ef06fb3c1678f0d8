"""The tables of host time: pure decode, and prompts that are taken in, both in memory that is no constraint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kv_replay import drive, vllm_process
from kv_replay.jobs import Job, result_of
from kv_replay.layouts import layer_specs
from kv_replay.results import Cell, Outcome, Result
from kv_replay.systems import Limits, System, build_scheduler
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.sizing import request_slabs
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """repeats: runs of each, in turns with the other systems, so that what else the machine does meets all of them.
    variants, vllm_python: see ReplayTable."""

    repeats: int = 1
    layouts: tuple[str, ...]
    systems: tuple[System, ...]
    variants: tuple[Limits, ...]
    vllm_python: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """num_requests requests of context_tokens each decode num_steps steps."""

    num_requests: int
    context_tokens: int
    num_steps: int

    def max_model_len(self, limits: Limits) -> int:
        output_tokens = drive.decode_output_tokens(self.num_requests, self.num_steps)
        return limits.whole_pages(self.context_tokens + output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSizes:
    """num_prompts prompts of num_prompt_tokens each, one at a time, beside num_siblings: see `drive.prompt_cost`."""

    num_prompt_tokens: int
    num_prompts: int = 20
    num_siblings: int = 0

    def max_model_len(self, limits: Limits) -> int:
        return limits.whole_pages(self.num_prompt_tokens + drive.PROMPT_OUTPUT_TOKENS)


def decode_jobs(table: HostTable, sizes: DecodeSizes) -> list[Job]:
    """One job per layout, repeat, system and variant."""
    trace = f"decode {sizes.num_requests} x {sizes.context_tokens}"
    return _jobs(table, trace, sizes.max_model_len, sizes.num_requests, partial(_decode, sizes))


def prompt_jobs(table: HostTable, sizes: PromptSizes) -> list[Job]:
    """One job per layout, repeat, system and variant. A step has room for a whole prompt, whatever the limits."""
    roomy = tuple(
        replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, sizes.num_prompt_tokens))
        for limits in table.variants
    )
    table = replace(table, variants=roomy)
    trace = f"prompts of {sizes.num_prompt_tokens}"
    if sizes.num_siblings:
        trace += f" beside {sizes.num_siblings}"
    return _jobs(
        table, trace, sizes.max_model_len, sizes.num_prompts, partial(_take_in, sizes), num_short=sizes.num_siblings
    )


def _jobs(
    table: HostTable,
    trace: str,
    max_model_len: Callable[[Limits], int],
    num_requests: int,
    run: Callable[[str | None, Cell, System, Limits], Outcome],
    *,
    num_short: int = 0,
) -> list[Job]:
    """num_short: requests of SIBLING_TOKENS that are to have room as well."""
    jobs: list[Job] = []
    for layout in table.layouts:
        for repeat in range(table.repeats):
            for system in table.systems:
                for limits in system.variants(table.variants):
                    specs = layer_specs(layout)
                    budget_bytes = _ample_bytes(specs, system, limits, max_model_len(limits), num_requests)
                    if num_short:
                        short_len = limits.whole_pages(drive.SIBLING_TOKENS + drive.PROMPT_OUTPUT_TOKENS)
                        budget_bytes += _ample_bytes(specs, system, limits, short_len, num_short)
                    cell = Cell(
                        trace=trace,
                        layout=layout,
                        budget_requests=None,
                        budget_bytes=budget_bytes,
                        system=system.name,
                        repeat=repeat,
                        **system.labels(limits),
                    )
                    jobs.append(partial(_run, run, table.vllm_python, cell, system, limits))
    return jobs


def _run(
    run: Callable[[str | None, Cell, System, Limits], Outcome],
    vllm_python: str | None,
    cell: Cell,
    system: System,
    limits: Limits,
) -> Result:
    return result_of(cell, partial(run, vllm_python, cell, system, limits))


def _decode(sizes: DecodeSizes, vllm_python: str | None, cell: Cell, system: System, limits: Limits) -> Outcome:
    specs = layer_specs(cell.layout)
    memory = {"budget_bytes": cell.budget_bytes, "max_model_len": sizes.max_model_len(limits)}
    counts: dict[str, Any] = {
        "num_requests": sizes.num_requests,
        "context_tokens": sizes.context_tokens,
        "num_steps": sizes.num_steps,
    }
    if system.is_vllm:
        return vllm_process.decode_only(vllm_python, system, specs, limits, **counts, **memory)
    scheduler = build_scheduler(system, specs, limits, **memory)
    if system.kind not in ("viewed", "profiled"):
        return drive.decode_only(scheduler, budget_bytes=cell.budget_bytes, **counts)
    with tempfile.TemporaryDirectory() as folder:
        trace_file = f"{folder}/trace.json" if system.kind == "profiled" else None
        view = drive.view_of(scheduler, trace_file=trace_file)
        return drive.decode_only(scheduler, budget_bytes=cell.budget_bytes, view=view, **counts)


def _take_in(sizes: PromptSizes, vllm_python: str | None, cell: Cell, system: System, limits: Limits) -> Outcome:
    specs = layer_specs(cell.layout)
    memory = {"budget_bytes": cell.budget_bytes, "max_model_len": sizes.max_model_len(limits)}
    counts = {
        "num_prompt_tokens": sizes.num_prompt_tokens,
        "num_prompts": sizes.num_prompts,
        "num_siblings": sizes.num_siblings,
    }
    if system.is_vllm:
        return vllm_process.prompt_cost(vllm_python, system, specs, limits, **counts, **memory)
    scheduler = build_scheduler(system, specs, limits, **memory)
    return drive.prompt_cost(scheduler, budget_bytes=cell.budget_bytes, **counts)


def _ample_bytes(
    specs: list[KVCacheSpec], system: System, limits: Limits, max_model_len: int, num_requests: int
) -> int:
    """Twice what the requests hold if each of them had a whole chunk in flight; with fixed pools or without
    windows, as if every layer kept everything."""
    keeps_all = system.kind in ("split", "hybrid-off")
    layout = build_layout(without_sliding(specs) if keeps_all else specs, page_tokens=limits.page_tokens)
    slabs = request_slabs(
        layout,
        max_model_len=max_model_len,
        chunk_tokens=limits.max_num_batched_tokens,
        interval_tokens=limits.eviction_tokens,
    )
    return 2 * (1 + slabs * num_requests) * layout.slab_bytes
