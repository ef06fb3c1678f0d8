"""Softmax over scores, with attention sinks."""

from __future__ import annotations

import torch


def attention_weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(softmax of scores [..., n]; what each row keeps of it beside the sinks, [..., 1], or None).

    A sink only widens the denominator: exp(s) / (sum + exp(sink)) is the plain softmax times
    sum / (sum + exp(sink)) = sigmoid(log sum - sink), which is applied to the small output instead.
    sinks broadcasts against scores[..., 0].
    """
    shares = None
    if sinks is not None:
        shares = torch.sigmoid(torch.logsumexp(scores, -1) - sinks).unsqueeze(-1)
    return torch.softmax(scores, -1), shares
