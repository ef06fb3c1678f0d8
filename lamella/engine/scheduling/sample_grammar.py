"""What scheduling asks of a grammar that an output follows; `lamella.engine.structured` has it."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class SampleGrammar(Protocol):
    """Of one sample. Each call says the whole output so far, int [n]."""

    @property
    def problem(self) -> str | None:
        """Why the output cannot go on; None: it can."""
        ...

    def mask(self, output_ids: np.ndarray) -> np.ndarray:
        """Which tokens may come next, as SamplingBatch.masks has it; none, where there is a problem."""
        ...

    def num_allowed(self, output_ids: np.ndarray, next_ids: list[int]) -> int:
        """How many of `next_ids`, from the first on, may come one after the other behind the output."""
        ...
