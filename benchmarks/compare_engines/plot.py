"""A comparison as a picture: a panel of bars per workload."""

from __future__ import annotations

from pathlib import Path

from compare_engines.engines import FP32
from compare_engines.results import Comparison, Spread
from lamella.errors import ConfigError
from lamella.plot_path import check_plot_path


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write `path`, a PNG: median seconds of each engine, with a line from the least to the most; engines with reduced
    weights are paler.

    Raises ConfigError as check_plot_path does, and where the file cannot be written.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure

    workloads, names = comparison.workloads(), list(comparison.engines)
    height = 1.2 + 0.45 * len(names)
    figure = Figure(figsize=(2 + 3.6 * len(workloads), height), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        for row, name in enumerate(names):
            one = comparison.find(name, workload.name)
            if one is None:
                continue
            spread = Spread.of(one.seconds)
            is_full = comparison.engines[name].precision == FP32
            colour = "C1" if name == comparison.base else "C0"
            error = [[spread.median - spread.least], [spread.most - spread.median]]
            panel.barh(row, spread.median, xerr=error, color=colour, alpha=1.0 if is_full else 0.5, capsize=3)
            panel.annotate(f" {spread.median:.1f}", (spread.most, row), va="center", fontsize=8)
        panel.set_title(workload.describe(), fontsize=9)
        panel.set_xlabel("seconds")
        panel.margins(x=0.15)
        panel.grid(axis="x", alpha=0.3)
    labels = [f"{name} ({comparison.engines[name].precision})" for name in names]
    panels[0].set_yticks(range(len(names)), labels)
    panels[0].invert_yaxis()
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error}") from error
