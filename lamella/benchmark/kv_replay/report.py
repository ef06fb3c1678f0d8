"""Results for people: a Markdown table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lamella.benchmark.kv_replay.results import Measurements, Refusal, Result
from lamella.errors import ConfigError

_COLUMNS = (
    "layout", "budget", "system", "hit share", "prefill tokens", "steps", "running mean (max)", "preempted",
    "wait steps p50 (max)", "host µs p50 (min)", "window held ÷ ideal", "unusable",
)  # fmt: skip


def markdown_table(results: Sequence[Result]) -> str:
    """One row per result."""
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    return "\n".join(lines + [_row(_cells(result)) for result in results])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(result: Result) -> list[str]:
    cell, outcome = result.cell, result.outcome
    budget = "ample" if cell.budget_requests is None else f"x{cell.budget_requests:g}"
    name = cell.system if cell.policy == "fcfs" else f"{cell.system} ({cell.policy})"
    first = [cell.layout, budget, name]
    if isinstance(outcome, Refusal):
        return [*first, f"refused: {outcome.refused}", *[""] * (len(_COLUMNS) - 4)]
    return [
        *first,
        f"{outcome.hit_share:.3f}",
        f"{outcome.prefill_tokens_computed:,}",
        f"{outcome.steps:,}",
        f"{outcome.mean_running:.1f} ({outcome.max_running})",
        f"{outcome.preemptions}",
        f"{outcome.wait_steps_p50:.0f} ({outcome.wait_steps_max})",
        f"{outcome.host_us_per_step_p50:.0f} ({outcome.host_us_per_step_min:.0f})",
        "" if outcome.windowed_held_over_ideal is None else f"{outcome.windowed_held_over_ideal:.2f}",
        "" if outcome.unusable_bytes_share is None else f"{100 * outcome.unusable_bytes_share:.2f} %",
    ]


def plot(results: Sequence[Result], path: str | Path) -> None:
    """Write `path`, a PNG: hit share against budget, one panel per layout and one line per system; of pure decodes,
    host time per step instead.

    Raises ConfigError when matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'a plot needs matplotlib, which is not installed; run: pip install "lamella[bench]"'
        ) from error
    layouts = list(dict.fromkeys(result.cell.layout for result in results))
    figure = Figure(figsize=(4.5 * max(1, len(layouts)), 4), layout="constrained")
    panels = figure.subplots(1, max(1, len(layouts)), squeeze=False, sharey=True)[0]
    is_decode = any(result.cell.budget_requests is None for result in results)
    for panel, layout in zip(panels, layouts, strict=False):
        of_layout = [result for result in results if result.cell.layout == layout]
        for system in dict.fromkeys(result.cell.system for result in of_layout):
            done = [
                (result.cell.budget_requests, result.outcome)
                for result in of_layout
                if result.cell.system == system and isinstance(result.outcome, Measurements)
            ]
            if is_decode:
                panel.bar([system], [outcome.host_us_per_step_p50 for _, outcome in done])
            else:
                panel.plot(
                    [budget for budget, _ in done], [outcome.hit_share for _, outcome in done], marker="o", label=system
                )
        panel.set_title(layout)
        if not is_decode:
            panel.set_xscale("log", base=2)
            panel.set_xlabel("budget (mean requests' full-attention KV)")
            panel.legend()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("host µs per step (p50)" if is_decode else "hit share of prompt tokens")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error}") from error
