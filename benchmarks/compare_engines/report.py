"""A comparison as Markdown, which reads as text, too."""

from __future__ import annotations

import json
from collections.abc import Sequence

from compare_engines.engines import FP32
from compare_engines.results import Comparison, Spread, agreement, first_token_agreement
from markdown_tables import table

NOTHING = "-"


def comparison_report(comparison: Comparison) -> str:
    """Seconds, ratios to the base engine, agreement of tokens, failures, and what it was run with.

    Engines that compute with the full float32 weights and those with reduced ones do unequal work: each kind has its
    own table.
    """
    parts = [
        f"{comparison.num_rounds} rounds in turn; medians, in brackets least and most.",
        "\n".join(f"- {workload.describe()}" for workload in comparison.workloads()),
    ]
    names = list(comparison.engines)
    for title, members in (
        ("float32 weights", [name for name in names if comparison.engines[name].precision == FP32]),
        ("reduced weights", [name for name in names if comparison.engines[name].precision != FP32]),
    ):
        if members:
            parts += [
                f"### Seconds, {title}",
                _seconds(comparison, members),
                f"### Time over {comparison.base}'s, {title} (above 1: {comparison.base} is faster)",
                _ratios(comparison, members),
            ]
    parts += [
        f"### Greedy tokens as {comparison.base}'s: first tokens / all up to the first difference",
        "After random prompts many tokens are nearly as likely as the first: engines with the same weights agree, "
        "those with reduced ones part early.",
        _agreement(comparison),
    ]
    if comparison.failures:
        parts.append("### Failures")
        parts += [f"{one.engine}, round {one.round_number}:\n\n```\n{one.message}\n```" for one in comparison.failures]
    return "\n\n".join([*parts, "### Run with", _facts(comparison)])


def _seconds(comparison: Comparison, names: Sequence[str]) -> str:
    workloads = comparison.workloads()
    rows = []
    for name in names:
        cells = [name, comparison.engines[name].precision]
        for workload in workloads:
            one = comparison.find(name, workload.name)
            cells.append(f"{Spread.of(one.seconds).text()}, {one.tokens_per_second:.1f} tok/s" if one else NOTHING)
        starts = next(one.start_seconds for one in comparison.measured if one.engine == name)
        rows.append([*cells, Spread.of(starts).text(1) if starts else NOTHING])
    return table(["engine", "weights", *(one.name for one in workloads), "start to first token"], rows)


def _ratios(comparison: Comparison, names: Sequence[str]) -> str:
    workloads = comparison.workloads()
    rows = []
    for name in names:
        found = [comparison.ratio(name, workload.name) for workload in workloads]
        precision = comparison.engines[name].precision
        rows.append([name, precision, *(ratio.text() if ratio else NOTHING for ratio in found)])
    return table(["engine", "weights", *(one.name for one in workloads)], rows)


def _agreement(comparison: Comparison) -> str:
    workloads = comparison.workloads()
    rows = []
    for name in comparison.engines:
        cells = [name]
        for workload in workloads:
            own, base = (comparison.find(one, workload.name) for one in (name, comparison.base))
            if own is None or base is None:
                cells.append(NOTHING)
                continue
            pair = own.output_token_ids, base.output_token_ids
            cells.append(f"{first_token_agreement(*pair):.2f} / {agreement(*pair):.2f}")
        rows.append(cells)
    return table(["engine", *(one.name for one in workloads)], rows)


def _facts(comparison: Comparison) -> str:
    lines = [f"- machine: {_listed(comparison.machine)}"]
    for name, facts in comparison.engines.items():
        lines.append(f"- {name}: {_listed({**facts.versions, **facts.settings})}")
    return "\n".join(lines)


def _listed(values: dict) -> str:
    return ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if value is not None
    )
