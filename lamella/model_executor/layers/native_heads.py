"""The next token's logits from native kernels, computed as far as they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lamella.native.elementwise import softcap
from lamella.native.layer_linear import LinearLayer
from lamella.native.library import PANEL
from lamella.native.top_columns import top_columns

_PART_BYTES = 4 << 20  # of scores at once


@dataclass(frozen=True, slots=True)
class NativeScores:
    """See HeadScores. hidden: float32 [S, width]; cap: the logits' soft-cap.

    multiply: rows of hidden -> all their scores. find_top: rows, count -> (ids, scores) of the largest without the
    others being written, or None where there is no such kernel. bias: float32 [vocab], added to all scores, or None.
    """

    hidden: torch.Tensor
    vocab_size: int
    cap: float | None
    multiply: Callable[[torch.Tensor], torch.Tensor]
    find_top: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None
    bias: torch.Tensor | None = None

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.multiply(self.hidden[rows])
        scores = scores if self.bias is None else scores.add_(self.bias)
        return scores if self.cap is None else softcap(scores, self.cap)

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, values = self.top(rows, 1)
        return ids[:, 0], values[:, 0]

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_top = min(num_top, self.vocab_size)
        # The soft-cap can round different scores to equal ones. Of those the lowest id counts, so all scores are
        # needed; and a bias changes which are the largest.
        if self.find_top is not None and self.cap is None and self.bias is None:
            return self.find_top(self.hidden[rows], num_top)
        logits = self.logits(rows)
        if num_top == 1:
            ids = logits.argmax(dim=1, keepdim=True)
            return ids, logits.gather(1, ids)
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return ids[:, :num_top], values[:, :num_top]


def scores_by_parts(
    layer: Callable[[int, int], LinearLayer],
    num_out: int,
    hidden: torch.Tensor,
    softcap: float | None,
    bias: torch.Tensor | None = None,
) -> NativeScores:
    """Scores of a head that is computed in parts. layer(start, stop): the head's outputs [start, stop)."""

    def multiply(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return layer(start, stop)(x)

    return NativeScores(
        hidden,
        num_out,
        softcap,
        lambda x: multiply(x, 0, num_out),
        lambda x, count: top_by_parts(multiply, x, num_out, count),
        bias,
    )


def top_by_parts(
    multiply: Callable[[torch.Tensor, int, int], torch.Tensor], x: torch.Tensor, num_out: int, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores) of the `num_top` largest outputs of each row of x, the lowest id first among equals.

    multiply(x, start, stop) gives the outputs [start, stop): as many at once as stay in the cache.
    """
    part_out = max(_PART_BYTES // (4 * max(1, len(x))) // PANEL, -(-num_top // PANEL), 64) * PANEL
    ids, values = [], []
    for start in range(0, num_out, part_out):
        stop = min(start + part_out, num_out)
        best, columns = top_columns(multiply(x, start, stop), min(num_top, stop - start))
        ids.append(columns + start if start else columns)
        values.append(best)
    if len(ids) == 1:
        return ids[0], values[0]
    best, at = top_columns(torch.cat(values, dim=1), num_top)
    return torch.cat(ids, dim=1).gather(1, at), best
