"""What a row of logits may give, in float64: full sorts, and sums that are not asked to decide close calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

MARGIN = 2e-6  # probabilities are not compared more closely than this


class Distribution(NamedTuple):
    """Tokens in the order in which they are drawn from, and where the share of each ends."""

    token_ids: np.ndarray  # int64 [n]
    ends: np.ndarray  # float64 [n], the last is 1

    def pick(self, number: float) -> int:
        return int(self.token_ids[int((self.ends <= number).sum())])

    def is_decided(self, number: float) -> bool:
        return bool((np.abs(self.ends - number) > MARGIN).all())

    def telling_numbers(self) -> list[float]:
        """Near the end of the first token's share and of one in the middle, and near both ends of the last one's."""
        begins = np.concatenate([[0.0], self.ends[:-1]])
        wide = np.flatnonzero(self.ends - begins > 4 * MARGIN)
        last = int(wide[-1])
        assert last == len(begins) - 1 or self.ends[last] > 1 - 100 * MARGIN
        ends = {int(wide[0]), int(wide[len(wide) // 2]), last}
        return [float(begins[last] + 2 * MARGIN), *[float(self.ends[i] - 2 * MARGIN) for i in sorted(ends)]]


def distribution(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Distribution:
    """logits: float [vocab], -inf for what cannot be drawn; temperature above 0. Close calls are an AssertionError."""
    values = logits.astype(np.float64)
    weights = np.exp((values - values.max()) / temperature)
    order = np.lexsort((np.arange(len(values)), -values))
    if (top_k, top_p, min_p) == (0, 1.0, 0.0):
        order = np.arange(len(values))
    if min_p > 0:
        assert min_p == 1.0 or np.abs(weights - min_p).min() > MARGIN
        order = order[weights[order] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        shares = np.cumsum(weights[order]) / weights[order].sum()
        assert np.abs(shares - top_p).min() > MARGIN
        order = order[: int((shares < top_p).sum()) + 1]
    order = order[weights[order] > 0]
    ends = np.cumsum(weights[order]) / weights[order].sum()
    ends[-1] = 1.0
    return Distribution(order, ends)


def penalised(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    """float64 [vocab], token by token."""
    changed = logits.astype(np.float64).copy()
    for token_id in range(len(changed)):
        if token_id in prompt or token_id in output:
            changed[token_id] = (
                changed[token_id] / repetition if changed[token_id] > 0 else changed[token_id] * repetition
            )
        changed[token_id] -= frequency * output.count(token_id)
        if token_id in output:
            changed[token_id] -= presence
    return changed


def edited_logits(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    allowed: set[int] | None = None,
    banned: Iterable[int] = (),
    biases: dict[int, float] | None = None,
    functions: Iterable[Callable[[list[int], list[int], np.ndarray], np.ndarray]] = (),
    **penalties: float,
) -> np.ndarray:
    """float64 [vocab], token by token: what may not come, biases, functions, what may not come, penalties."""
    may_not_come = [
        token for token in range(len(logits)) if token in banned or (allowed is not None and token not in allowed)
    ]
    changed = logits.astype(np.float64).copy()
    changed[may_not_come] = -np.inf
    for token, bias in (biases or {}).items():
        changed[token] += bias
    for function in functions:
        changed = function(prompt, output, changed)
    changed[may_not_come] = -np.inf
    return penalised(changed, prompt, output, **penalties)
