"""A plan as a picture: what runs at once against context length, one line per way to divide the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamella.errors import ConfigError
from lamella.kv_cache.report import format_bytes
from lamella.planner.plan import MemoryPlan
from lamella.plot_path import check_plot_path


def plot_plan(plan: MemoryPlan, path: str | Path) -> None:
    """Write `path`, a PNG. Raises ConfigError as `check_plot_path` does, and where writing fails after all."""
    path = Path(path)
    check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    # The number of requests alone falls so steeply with the context that all lines would lie on each other.
    for system, num_requests in plan.curves.items():
        tokens = [count * context / 1e6 for count, context in zip(num_requests, plan.curve_contexts, strict=True)]
        axes.plot(plan.curve_contexts, tokens, marker="o", markersize=3, label=system, **_line_style(plan, system))
    axes.axvline(plan.options.context_tokens, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(plan.curve_contexts, [f"{context:,}" for context in plan.curve_contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens per request)")
    axes.set_ylabel("tokens of the requests that run at once (millions)")
    axes.set_title(f"{plan.model}, {format_bytes(plan.options.memory_bytes)} of KV memory")
    figure.legend(loc="outside right upper")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error}") from error


def _line_style(plan: MemoryPlan, system: str) -> dict[str, Any]:
    """Fixed pools are thin and shade from blue to red with the ratio, so that the other two stand out."""
    split = [cell.system for cell in plan.cells]
    if system not in split:
        return {"linewidth": 2.5, "color": "black" if system == plan.outcomes[0].system else "grey"}
    share = split.index(system) / max(1, len(split) - 1)
    return {"linewidth": 1.2, "linestyle": "--", "color": (0.15 + 0.7 * share, 0.35, 0.85 - 0.7 * share)}
