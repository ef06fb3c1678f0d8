"""Results of replays as a picture: what each system makes of more memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv_replay.comparison import OURS
from kv_replay.results import Measurements, Result, budget_name
from lamella.errors import ConfigError
from lamella.plot_path import check_plot_path

ROWS = (("hit_share", "hit share of prompt tokens"), ("mean_running", "requests running, mean"))


def plot_replays(results: Sequence[Result], path: str | Path) -> None:
    """Write `path`, a PNG, against the budget: per trace a row of panels for the hit share and one for the running
    requests, a column per layout, and a line per system (and policy and interval, where these differ).

    Raises ConfigError as check_plot_path does, and where the file cannot be written.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(result.cell.trace for result in results))
    layouts = list(dict.fromkeys(result.cell.layout for result in results))
    labels = _labels(results)
    styles = _styles(results, labels)
    num_rows = len(ROWS) * len(traces)
    figure = Figure(figsize=(1.5 + 4.2 * len(layouts), 1 + 2.8 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, len(layouts), squeeze=False, sharex=True, sharey="row")
    handles = {}
    for row in range(num_rows):
        trace, (field, words) = traces[row // len(ROWS)], ROWS[row % len(ROWS)]
        for column, layout in enumerate(layouts):
            panel = panels[row][column]
            lines = _lines(results, labels, trace, layout, field)
            for label, points in lines.items():
                budgets, values = zip(*points, strict=True)
                (handles[label],) = panel.plot(budgets, values, marker="o", markersize=4, label=label, **styles[label])
            panel.set_title(f"{layout}, {trace}", fontsize=10)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        panels[row][0].set_ylabel(words)
    ticks = sorted({result.cell.budget_requests or 0 for result in results})
    for panel in panels[-1]:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [budget_name(budget) for budget in ticks])
        panel.set_xlabel("budget: full-attention KV of so many mean requests")
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error}") from error


def _labels(results: Sequence[Result]) -> list[str]:
    """One per result. Policies and intervals are named only where there are several of lamella's."""
    own = [result.cell for result in results if result.cell.interval_tokens is not None]
    many_policies = len({cell.policy for cell in own}) > 1
    many_intervals = len({cell.interval_tokens for cell in own}) > 1
    labels = []
    for result in results:
        cell = result.cell
        parts = [cell.system]
        if cell.interval_tokens is not None:
            parts += [cell.policy] * many_policies + [f"I={cell.interval_tokens}"] * many_intervals
        labels.append(" ".join(parts))
    return labels


def _styles(results: Sequence[Result], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> line style: a colour per system, a dash pattern per policy and interval. lamella stands out from what
    it is compared with."""
    cells = [result.cell for result in results]
    systems = list(dict.fromkeys(cell.system for cell in cells))
    variants = list(dict.fromkeys((cell.policy, cell.interval_tokens) for cell in cells))
    return {
        label: {
            "color": f"C{systems.index(cell.system) % 10}",
            "linestyle": ("-", "--", "-.", ":")[variants.index((cell.policy, cell.interval_tokens)) % 4],
            "linewidth": 2.2 if cell.system == OURS else 1.1,
        }
        for cell, label in zip(cells, labels, strict=True)
    }


def _lines(
    results: Sequence[Result], labels: Sequence[str], trace: str, layout: str, field: str
) -> dict[str, list[tuple[float, float]]]:
    """Label -> (budget, value) of each cell that ran, in the order of budgets."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result, label in zip(results, labels, strict=True):
        cell, outcome = result.cell, result.outcome
        if (cell.trace, cell.layout) == (trace, layout) and isinstance(outcome, Measurements):
            assert cell.budget_requests is not None
            lines.setdefault(label, []).append((cell.budget_requests, getattr(outcome, field)))
    return {label: sorted(points) for label, points in lines.items()}
