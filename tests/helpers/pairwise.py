"""Few combinations that have every pair of choices."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows {factor: choice} in which any two choices of any two factors occur together; always the same rows.

    Greedy: the row begins with a pair that is missing, and each further factor takes the choice that adds most pairs.
    """
    rng = random.Random(0)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def pair(a: str, i: int, b: str, j: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ((a, i), (b, j)) if names.index(a) < names.index(b) else ((b, j), (a, i))

    rows = []
    while missing:
        row = dict(min(missing))
        for name in rng.sample(names, len(names)):
            if name not in row:
                choices = range(len(factors[name]))
                gains = [sum(pair(name, i, other, j) in missing for other, j in row.items()) for i in choices]
                best = max(gains)
                row[name] = rng.choice([i for i in choices if gains[i] == best])
        missing -= {pair(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows
