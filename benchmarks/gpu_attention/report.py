"""Figures of one run, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_attention.timing import Ceilings


@dataclass(frozen=True, slots=True)
class Figure:
    """What one kernel did with one workload: seconds, or the problem that kept it from being timed.

    num_bytes, num_flops: what the workload needs at least, the same for every kernel.
    """

    workload: str
    peer: str
    num_bytes: int
    num_flops: int
    seconds: float | None = None
    problem: str | None = None


def markdown(machine: str, ceilings: Ceilings, figures: Sequence[Figure], missing: Sequence[str]) -> str:
    """missing: names of kernels that are not installed."""
    lines = [
        machine,
        "",
        f"Ceilings, measured in the same run: a copy moves {ceilings.bytes_per_second / 1e9:,.0f} GB/s, a bf16 matrix "
        f"product does {ceilings.flops_per_second / 1e12:,.0f} TFLOP/s.",
        "",
        "| workload | kernel | µs | GB/s | of a copy | TFLOP/s | of a product |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        if figure.seconds is None:
            continue
        per_second = figure.num_bytes / figure.seconds
        flops = figure.num_flops / figure.seconds
        lines.append(
            f"| {figure.workload} | {figure.peer} | {figure.seconds * 1e6:,.1f} | {per_second / 1e9:,.0f} "
            f"| {per_second / ceilings.bytes_per_second:.0%} | {flops / 1e12:,.1f} "
            f"| {flops / ceilings.flops_per_second:.0%} |"
        )
    untimed = [f"- {figure.peer}, {figure.workload}: {figure.problem}" for figure in figures if figure.seconds is None]
    if untimed:
        lines += ["", "Not timed:", "", *untimed]
    if missing:
        lines += ["", f"Not installed: {', '.join(missing)}."]
    return "\n".join(lines)
