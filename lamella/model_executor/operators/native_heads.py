"""The next token's logits from native kernels, computed as far as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lamella.native.elementwise import softcap


@dataclass(frozen=True, slots=True)
class NativeScores:
    """See HeadScores. hidden: float32 [S, width]; cap: the logits' soft-cap.

    multiply: rows of hidden -> all their scores. find_top: rows, count -> (ids, scores) of the largest without the
    others being written, or None where there is no such kernel.
    """

    hidden: torch.Tensor
    vocab_size: int
    cap: float | None
    multiply: Callable[[torch.Tensor], torch.Tensor]
    find_top: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.multiply(self.hidden[rows])
        return scores if self.cap is None else softcap(scores, self.cap)

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, values = self.top(rows, 1)
        return ids[:, 0], values[:, 0]

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_top = min(num_top, self.vocab_size)
        # A cap can make different scores equal, and then the lower id counts: all must be seen.
        if self.find_top is not None and self.cap is None:
            return self.find_top(self.hidden[rows], num_top)
        logits = self.logits(rows)
        if num_top == 1:
            ids = logits.argmax(dim=1, keepdim=True)
            return ids, logits.gather(1, ids)
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return ids[:, :num_top], values[:, :num_top]
