"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(_row(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
