"""The next token's logits from native kernels, computed as far as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lamella.native.elementwise import softcap
from lamella.native.library import PANEL

_PART_BYTES = 4 << 20  # of scores at once
_BLOCK_COLUMNS = 256


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


def top_by_parts(
    multiply: Callable[[torch.Tensor, int, int], torch.Tensor], x: torch.Tensor, num_out: int, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores) of the `num_top` largest outputs of each row of x, the lowest id first among equals.

    multiply(x, start, stop) gives the outputs [start, stop): as many at once as stay in the cache.
    """
    part_out = max(_PART_BYTES // (4 * max(1, len(x))) // PANEL, -(-num_top // PANEL), 64) * PANEL
    ids, values = [], []
    for start in range(0, num_out, part_out):
        scores = multiply(x, start, min(start + part_out, num_out))
        best, at = _largest(scores) if num_top == 1 else _top(scores, num_top)
        ids.append(at + start)
        values.append(best)
    best, at = _top(torch.cat(values, dim=1), num_top)
    return torch.cat(ids, dim=1).gather(1, at), best


def _largest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, columns) [T, 1] of the largest, the first among equals. Reducing blocks of columns and looking into one
    is several times faster than torch.max with its indices."""
    num_columns = scores.shape[1]
    if num_columns % _BLOCK_COLUMNS:
        return scores.max(dim=1, keepdim=True)
    maxima = scores.unflatten(1, (-1, _BLOCK_COLUMNS)).amax(2)
    block = maxima.argmax(dim=1, keepdim=True) * _BLOCK_COLUMNS  # the first among equals
    columns = block + torch.arange(_BLOCK_COLUMNS)
    within = scores.gather(1, columns)
    at = within.argmax(dim=1, keepdim=True)
    return within.gather(1, at), block + at


def _top(scores: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, columns), largest first and the first among equals, which torch.topk does not promise."""
    num_top = min(num_top, scores.shape[1])
    threshold = scores.topk(num_top, dim=1).values[:, -1:]
    if bool(((scores >= threshold).sum(dim=1) > num_top).any()):
        best, columns = scores.sort(dim=1, descending=True, stable=True)
        return best[:, :num_top], columns[:, :num_top]
    best, columns = scores.topk(num_top, dim=1)
    columns, order = columns.sort(dim=1)
    best, again = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, columns.gather(1, again)
