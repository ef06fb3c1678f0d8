"""A histogram that is cheap to fill: many equal or batched observations cost one call."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence


class BucketCounts:
    """How many observations there were up to each of `bounds`, which ascend; what is above the last counts, too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Iterable[float], times: int = 1) -> None:
        """Count each value so many times."""
        for value in values:
            self.observe(value, times)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, observations up to it), as Prometheus has them; the last bound is "+Inf"."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to `most`: bounds for numbers of tokens."""
    bounds: list[float] = []
    step = 1
    while step <= most:
        bounds += [step * digit for digit in (1, 2, 5) if step * digit <= most]
        step *= 10
    return bounds
