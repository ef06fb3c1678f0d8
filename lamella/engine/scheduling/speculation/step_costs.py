"""What a step takes by how many tokens it computes: measured when the engine starts, and corrected as it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# How much of what a step took differently from what was expected is believed.
_TRUST = 0.1
# A step that took more than so many times what was expected was held up by something else.
_MOST_FACTOR = 2.0


class StepCosts:
    """sizes: numbers of tokens, ascending. seconds: what steps of these sizes take. Between two sizes, and beyond the
    last, it is taken to rise evenly. One size alone: all steps cost the same, so that every draft pays."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self._sizes = np.array(sizes, dtype=np.float64)
        self._seconds = np.array(seconds, dtype=np.float64)

    @property
    def largest_size(self) -> int:
        return int(self._sizes[-1])

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """num_tokens: int64 [n] -> float64 [n]."""
        sizes, seconds = self._sizes, self._seconds
        found: np.ndarray = np.interp(num_tokens, sizes, seconds)
        if len(sizes) > 1:
            slope = max(0.0, seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            found = found + slope * np.maximum(0, num_tokens - sizes[-1])
        return found

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. Sizes beyond the largest that was measured teach nothing."""
        if num_tokens > self._sizes[-1] or len(self._sizes) == 1:
            return
        expected = float(np.interp(num_tokens, self._sizes, self._seconds))
        factor = min(max(seconds / expected, 1 / _MOST_FACTOR), _MOST_FACTOR)
        above = int(np.searchsorted(self._sizes, num_tokens))
        below = above if self._sizes[above] == num_tokens else max(0, above - 1)
        span = self._sizes[above] - self._sizes[below]
        share = (num_tokens - self._sizes[below]) / span if span else 1.0
        for index, weight in {below: 1 - share, above: share}.items():
            self._seconds[index] *= 1 + _TRUST * weight * (factor - 1)
