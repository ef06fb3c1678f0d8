"""What a simulation of replicas found, as text."""

from __future__ import annotations

from collections.abc import Sequence

from kv_replay.capacity_plan import Choice, Target, cheapest
from kv_replay.simulated_replicas import ClusterResult
from kv_replay.step_cost_model import PredictionError, StepCostModel
from markdown_tables import table

_GIB = 1 << 30


def costs_report(costs: StepCostModel, error: PredictionError) -> str:
    return (
        f"a step takes {1e3 * costs.step:.3g} ms, {1e6 * costs.token:.3g} us a token, {1e6 * costs.request:.3g} us a "
        f"request, {1e6 * costs.kv_token:.3g} us a token whose KV it reads, {1e9 * costs.attended_token:.3g} ns a pair "
        f"of tokens; a fit to every second step misses the other {error.num_steps} by {error.median:.1%} (median), "
        f"{error.p90:.1%} (p90), and their sum by {error.of_sum:.1%}"
    )


def comparison_report(results: Sequence[ClusterResult]) -> str:
    columns = [
        "policy", "replicas", "KV each, GiB", "hit share", "tokens/s", "output tokens/s", "first token p50/p90/p99, s",
        "answer p50/p90/p99, s", "most/mean work", "busy", "preempted", "steps", "simulated in, s",
    ]  # fmt: skip
    return table(columns, [_row(result) for result in results])


def plan_report(choices: Sequence[Choice], target: Target) -> str:
    rows = []
    for choice in choices:
        memory, result = f"{choice.budget_bytes / _GIB:.2f}", choice.result
        if result is None:
            rows.append([memory, "none", "", "", "", "", choice.reason or ""])
            continue
        rows.append(
            [memory, str(result.num_replicas), f"{result.num_replicas * choice.budget_bytes / _GIB:.2f}",
             f"{result.hit_share:.1%}", _percentiles(result.first_token), _percentiles(result.answer), ""]
        )  # fmt: skip
    columns = ["KV each, GiB", "replicas", "KV in all, GiB", "hit share", "first token p50/p90/p99, s",
               "answer p50/p90/p99, s", "why none"]  # fmt: skip
    limits = [("first token", target.first_token_seconds), ("answer", target.answer_seconds)]
    asked = " and ".join(f"{name} within {most:g} s" for name, most in limits if most is not None)
    best = cheapest(choices)
    answer = "no size of those meets it"
    if best is not None and best.result is not None:
        answer = f"{best.result.num_replicas} replicas of {best.budget_bytes / _GIB:.2f} GiB take the least memory"
    return f"{target.quantile} of {asked}: {answer}\n\n{table(columns, rows)}"


def _row(result: ClusterResult) -> list[str]:
    return [
        result.policy,
        str(result.num_replicas),
        f"{result.budget_bytes / _GIB:.2f}",
        f"{result.hit_share:.1%}",
        f"{result.tokens_per_second:,.0f}",
        f"{result.output_tokens_per_second:,.0f}",
        _percentiles(result.first_token),
        _percentiles(result.answer),
        f"{result.most_over_mean_work:.2f}",
        f"{result.busy_share:.0%}",
        str(result.num_preemptions),
        f"{result.num_steps:,}",
        f"{result.wall_seconds:.0f}",
    ]


def _percentiles(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3g}" for value in values)
