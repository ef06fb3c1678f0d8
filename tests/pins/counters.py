"""What scheduler and cache count on the traces: lamella's own, without a model, as the KV replay drives them."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

from tests.pins.replay_places import Limits, System, budget_in_bytes, build_scheduler, layer_specs, replay
from tests.pins.traces import NUM_SESSIONS_AT_ONCE, TRACES

LAYOUTS = ("gpt-oss-20b", "mimo-v2-flash", "gemma-3-27b")
POLICIES = ("fcfs", "prefix")
CASES = tuple(product(TRACES, LAYOUTS, POLICIES))
# Few enough that requests are preempted and what is cached goes.
BUDGET_REQUESTS = {"gpt-oss-20b": 6.0, "mimo-v2-flash": 8.0, "gemma-3-27b": 14.0}
LIMITS = Limits(page_tokens=16, max_num_seqs=10, max_num_batched_tokens=512)


def count(trace: str, layout: str, policy: str) -> dict[str, Any]:
    """Every counter, by name."""
    requests = TRACES[trace]()
    specs = layer_specs(layout)
    budget_bytes = budget_in_bytes(BUDGET_REQUESTS[layout], requests, specs)
    limits = replace(LIMITS, policy=policy)
    longest = max(request.num_tokens for request in requests)
    scheduler = build_scheduler(
        System("lamella"), specs, limits, budget_bytes=budget_bytes, max_model_len=limits.whole_pages(longest)
    )
    measured = asdict(replay(scheduler, requests, num_sessions=NUM_SESSIONS_AT_ONCE, budget_bytes=budget_bytes))
    counters = scheduler.counters()
    scheduling = counters._asdict()
    del scheduling["hits"]
    cache = asdict(scheduler.manager.counters(counters.hits))
    cache["pages"] = {group: usage._asdict() for group, usage in cache["pages"].items()}
    return {
        "replay": {key: value for key, value in measured.items() if isinstance(value, (int, dict))},
        "scheduler": scheduling,
        "cache": cache,
    }


def case_name(trace: str, layout: str, policy: str) -> str:
    return f"{trace}, {layout}, {policy}"


def count_all() -> dict[str, Any]:
    return {case_name(*case): count(*case) for case in CASES}
