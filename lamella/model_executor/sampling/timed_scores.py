"""Logits on demand, with a clock."""

from __future__ import annotations

import time

import torch

from lamella.model_executor.layers.contract import HeadScores
from lamella.model_executor.step_clock import StepClock


class TimedScores:
    """Logits on demand, whose time is the head's and not that of the sampling that asks for them."""

    def __init__(self, scores: HeadScores, clock: StepClock) -> None:
        self._scores, self._clock = scores, clock

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = time.monotonic()
        found = self._scores.largest(rows)
        self._add(start)
        return found

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = time.monotonic()
        found = self._scores.top(rows, num_top)
        self._add(start)
        return found

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        start = time.monotonic()
        found = self._scores.logits(rows)
        self._add(start)
        return found

    def _add(self, start: float) -> None:
        seconds = time.monotonic() - start
        self._clock.head += seconds
        self._clock.sampling -= seconds
