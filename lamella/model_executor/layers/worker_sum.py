"""The sum over workers that compute every layer together: the only point at which they meet."""

from __future__ import annotations

from typing import Protocol

import torch


class WorkerSum(Protocol):
    """What operators know of the other workers."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def num_workers(self) -> int: ...

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over all workers of what each has computed of a layer's output, y [T, width]; every worker gets the
        same bits. All workers call it equally often, with y of one shape. y may be overwritten."""
        ...


class OneWorker:
    """Who computes alone: the sum is what that one has computed."""

    rank = 0
    num_workers = 1

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        return y


ONE_WORKER = OneWorker()
