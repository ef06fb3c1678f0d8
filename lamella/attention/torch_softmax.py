"""Softmax over scores, with attention sinks."""

from __future__ import annotations

import torch


def attention_weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (softmax of scores [..., n]; the share of it that is left to each row beside its sink, [..., 1], or None
    without sinks).

    A sink only widens the denominator: exp(s) / (sum + exp(sink)) is the plain softmax times
    sum / (sum + exp(sink)) = sigmoid(log sum - sink), which is applied to the small output instead.
    sinks broadcasts against scores[..., 0].
    """
    shares = None
    if sinks is not None:
        shares = torch.sigmoid(torch.logsumexp(scores, -1) - sinks).unsqueeze(-1)
    return torch.softmax(scores, -1), shares
