"""Results of host time runs for people: Markdown tables, repeats of a run together in one row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from kv_replay.report import INTERVAL_COLUMNS, interval_cells, refusal_cells
from kv_replay.results import Measurements, PromptCost, Result
from markdown_tables import table

_CELL_COLUMNS = ("workload", "layout", "system", "interval", "runs")


def decode_report(results: Sequence[Result]) -> str:
    """p50, min and mean are over the decode steps of a run, median and least over runs. Of memory, the mean is that of
    the decode steps and the peak that of the whole run, the chunks of the prefills included."""
    columns = (
        *_CELL_COLUMNS, "p50 µs, median", "p50 µs, least", "min µs, median", "min µs, least", "mean µs, median",
        *INTERVAL_COLUMNS[2:],
    )  # fmt: skip
    rows = []
    for runs in _repeats(results):
        first = _first_cells(runs)
        outcomes = [run.outcome for run in runs if isinstance(run.outcome, Measurements)]
        if not outcomes:
            rows.append([*first, *refusal_cells(runs[0], len(columns) - len(first))])
            continue
        p50 = [outcome.host_us_per_step_p50 for outcome in outcomes]
        least = [outcome.host_us_per_step_min for outcome in outcomes]
        mean = [outcome.host_us_per_step_mean for outcome in outcomes]
        times = [statistics.median(p50), min(p50), statistics.median(least), min(least), statistics.median(mean)]
        memory = interval_cells(runs[0].cell, outcomes[0])[2:]
        rows.append([*first, *(f"{time:.0f}" for time in times), *memory])
    return table(columns, rows)


def prompt_report(results: Sequence[Result]) -> str:
    """Each figure is the median over runs of a run's median over its prompts, but for the last two."""
    columns = (
        *_CELL_COLUMNS, "add µs", "schedule µs", "update µs", "of these match + insert µs", "total µs",
        "total µs, least median", "total µs, least of all",
    )  # fmt: skip
    rows = []
    for runs in _repeats(results):
        first = _first_cells(runs)
        costs = [run.outcome for run in runs if isinstance(run.outcome, PromptCost)]
        if not costs:
            rows.append([*first, *refusal_cells(runs[0], len(columns) - len(first))])
            continue
        totals = [cost.total_us_p50 for cost in costs]
        cache = [cost.cache_us_p50 for cost in costs if cost.cache_us_p50 is not None]
        figures = [
            statistics.median(cost.add_us_p50 for cost in costs),
            statistics.median(cost.schedule_us_p50 for cost in costs),
            statistics.median(cost.update_us_p50 for cost in costs),
            statistics.median(cache) if cache else None,
            statistics.median(totals),
            min(totals),
            min(cost.total_us_min for cost in costs),
        ]
        rows.append([*first, *("" if figure is None else f"{figure:.0f}" for figure in figures)])
    return table(columns, rows)


def _repeats(results: Sequence[Result]) -> list[list[Result]]:
    """Runs of the same, together."""
    groups: dict[object, list[Result]] = {}
    for result in results:
        groups.setdefault(replace(result.cell, repeat=0), []).append(result)
    return list(groups.values())


def _first_cells(runs: Sequence[Result]) -> list[str]:
    cell = runs[0].cell
    interval = "" if cell.interval_tokens is None else f"{cell.interval_tokens}"
    return [cell.trace, cell.layout, cell.system, interval, f"{len(runs)}"]
