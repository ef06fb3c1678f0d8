"""Results of replays for people: Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from kv_replay.comparison import OURS, Comparison, Gap, Mean, VllmCell, compare
from kv_replay.results import Cell, Measurements, Refusal, Result, budget_name
from markdown_tables import table

_CELL_COLUMNS = ("trace", "layout", "budget", "system", "policy", "interval")
_COLUMNS = (
    *_CELL_COLUMNS, "hit share", "prefill tokens", "steps", "running mean (max)", "preempted", "wait steps p50 (max)",
    "host µs p50 (min)", "add µs p50", "window held ÷ ideal", "unusable",
)  # fmt: skip


def replay_report(results: Sequence[Result]) -> str:
    """All results, then what there is to compare: policies, intervals, lamella and the others."""
    parts = [table(_COLUMNS, [_row(result) for result in results])]
    if len({result.cell.policy for result in _of_lamella(results)}) > 1:
        parts.append(f"Waiting\n\n{_waiting(results)}")
    if len({result.cell.interval_tokens for result in _of_lamella(results)}) > 1:
        parts.append(f"Eviction intervals\n\n{_intervals(results)}")
    comparisons = compare(results)
    for comparison in comparisons:
        parts.append(_comparison(comparison, is_only=len(comparisons) == 1))
    return "\n\n".join(parts)


def _of_lamella(results: Sequence[Result]) -> list[Result]:
    """Those that the options for policy and interval concern."""
    return [result for result in results if result.cell.interval_tokens is not None]


def cell_cells(result: Result) -> list[str]:
    """What is compared where, for _CELL_COLUMNS."""
    cell, outcome = result.cell, result.outcome
    interval = "" if cell.interval_tokens is None else f"{cell.interval_tokens}"
    if isinstance(outcome, Measurements) and outcome.used_interval_tokens != cell.interval_tokens:
        interval += f" (used: {outcome.used_interval_tokens})"
    return [cell.trace, cell.layout, budget_name(cell.budget_requests), cell.system, cell.policy, interval]


def _row(result: Result) -> list[str]:
    outcome = result.outcome
    first = cell_cells(result)
    if not isinstance(outcome, Measurements):
        return [*first, *refusal_cells(result, len(_COLUMNS) - len(first))]
    return [
        *first,
        f"{outcome.hit_share:.3f}",
        f"{outcome.prefill_tokens_computed:,}",
        f"{outcome.steps:,}",
        f"{outcome.mean_running:.1f} ({outcome.max_running})",
        f"{outcome.preemptions}",
        _wait(outcome),
        f"{outcome.host_us_per_step_p50:.0f} ({outcome.host_us_per_step_min:.0f})",
        f"{outcome.add_us_p50:.0f}",
        _number(outcome.windowed_held_over_ideal),
        "" if outcome.unusable_bytes_share is None else f"{100 * outcome.unusable_bytes_share:.2f} %",
    ]


def refusal_cells(result: Result, num_columns: int) -> list[str]:
    assert isinstance(result.outcome, Refusal)
    return [f"refused: {result.outcome.refused}", *[""] * (num_columns - 1)]


def _waiting(results: Sequence[Result]) -> str:
    """Policies side by side. vLLM stands under its own, first come, first served."""
    policies = list(dict.fromkeys(result.cell.policy for result in results))
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for result in results:
        if isinstance(result.outcome, Measurements):
            trace, layout, budget, system, policy, interval = cell_cells(result)
            by_policy = rows.setdefault((trace, layout, budget, system, interval), {})
            by_policy[policy] = [f"{result.outcome.hit_share:.3f}", _wait(result.outcome)]
    columns = ["trace", "layout", "budget", "system", "interval"]
    for policy in policies:
        columns += [f"hit share, {policy}", f"wait steps p50 (max), {policy}"]
    return table(
        columns,
        [
            [*place, *(text for policy in policies for text in by_policy.get(policy, ["", ""]))]
            for place, by_policy in rows.items()
        ],
    )


def _intervals(results: Sequence[Result]) -> str:
    columns = (*_CELL_COLUMNS, *INTERVAL_COLUMNS)
    ran = [(result, result.outcome) for result in results if isinstance(result.outcome, Measurements)]
    return table(columns, [[*cell_cells(result), *interval_cells(result.cell, outcome)] for result, outcome in ran])


INTERVAL_COLUMNS = (
    "host µs p50", "host µs mean", "window MiB held, mean", "window held ÷ ideal", "window MiB held, peak",
)  # fmt: skip


def interval_cells(cell: Cell, outcome: Measurements) -> list[str]:
    """What an eviction interval trades: host time against bytes of windowed groups."""
    mib = 2**20
    # hybrid-off has one group, "full", and so no windowed bytes.
    peak = sum(count for group, count in outcome.peak_bytes.items() if not group.startswith("full"))
    held = outcome.windowed_bytes_mean
    return [
        f"{outcome.host_us_per_step_p50:.0f}",
        f"{outcome.host_us_per_step_mean:.0f}",
        "" if held is None else f"{held / mib:,.1f}",
        _number(outcome.windowed_held_over_ideal),
        f"{peak / mib:,.1f}" if outcome.peak_bytes else "",
    ]


def _comparison(comparison: Comparison, *, is_only: bool) -> str:
    policy, interval = comparison.variant
    title = "lamella against the others" + ("" if is_only else f", {policy}, interval {interval}")
    parts = [
        title,
        table(("system", "prefill tokens ÷ lamella's, geometric mean", "cells that both ran", "refused"),
              [_mean_row(mean) for mean in comparison.means]),
        "A cell that one of the two refused is in no mean. " + _refusals(comparison.means),
    ]  # fmt: skip
    worst = comparison.worst_gap
    if worst is not None:
        columns = ("cell", "lamella's prefill tokens", "best ratio", "its prefill tokens", "difference ÷ prompt tokens")
        parts += [
            table(columns, [_gap_row(gap) for gap in comparison.gaps]),
            f"Worst cell: {worst.place}: {_share(worst)} of all prompt tokens against {worst.best_system}.",
        ]
    if comparison.vllm_cells:
        parts += [
            "lamella and the best of vLLM's settings in each figure",
            table(_VLLM_COLUMNS, [_vllm_row(cell) for cell in comparison.vllm_cells]),
        ]
    return "\n\n".join(parts)


_VLLM_COLUMNS = (
    "cell", "hit share", "vLLM's", "running mean", "vLLM's", "steps", "vLLM's", "window held ÷ ideal", "vLLM's",
)  # fmt: skip


def _vllm_row(cell: VllmCell) -> list[str]:
    shares = [f"{share:.3f}" for share in (cell.hit_share, cell.best_hit_share)]
    running = [f"{count:.1f}" for count in (cell.mean_running, cell.best_mean_running)]
    steps = [f"{count:,}" for count in (cell.steps, cell.best_steps)]
    held = [_number(cell.window_held), _number(cell.best_window_held)]
    return [str(cell.place), *shares, *running, *steps, *held]


def _mean_row(mean: Mean) -> list[str]:
    ratio = "" if mean.ratio is None else f"{mean.ratio:.4f}"
    return [mean.system, ratio, f"{mean.num_both}", f"{len(mean.refused)}"]


def _refusals(means: Sequence[Mean]) -> str:
    lists = [f"{mean.system} refused {_places(mean.refused)}." for mean in means if mean.refused]
    lists += [
        f"{OURS} refused, and {mean.system} ran, {_places(mean.only_system)}." for mean in means if mean.only_system
    ]
    return " ".join(lists) or "None was."


def _places(places: Sequence[object]) -> str:
    return "; ".join(str(place) for place in places)


def _gap_row(gap: Gap) -> list[str]:
    tokens = "refused" if gap.tokens is None else f"{gap.tokens:,}"
    return [str(gap.place), tokens, gap.best_system, f"{gap.best_tokens:,}", _share(gap)]


def _share(gap: Gap) -> str:
    return "refused" if gap.share is None else f"{100 * gap.share:+.2f} %"


def _wait(outcome: Measurements) -> str:
    return f"{outcome.wait_steps_p50:.0f} ({outcome.wait_steps_max})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
