"""How many drafts a step verifies, and whose: as many as bring more tokens in the time that they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lamella.engine.scheduling.speculation.step_costs import StepCosts

# Drafts are worth while where they are expected to gain this much. Less is within the error of what was measured.
LEAST_GAIN = 0.03


def num_drafts_each(costs: StepCosts, num_tokens: int, chances: Sequence[Sequence[float]], most: int) -> list[int]:
    """num_tokens: how many the step computes anyhow. chances: for each row and each of its drafts, that it and all
    before it are right, so that they do not rise. most: drafts of all rows together. -> drafts of each row.

    Of all drafts the likeliest come first. Of their numbers the one is taken with the most tokens per second, a token
    that is computed anyhow counted as one.
    """
    counts = [0] * len(chances)
    rows = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
    each = np.array([chance for one in chances for chance in one])
    order = np.argsort(-each, kind="stable")[: max(0, most)]
    if not len(order):
        return counts
    num_expected = num_tokens + np.concatenate([[0.0], np.cumsum(each[order])])
    rates = num_expected / costs.seconds(num_tokens + np.arange(len(num_expected)))
    best = int(rates.argmax())
    if rates[best] < (1 + LEAST_GAIN) * rates[0]:
        return counts
    for row in rows[order[:best]].tolist():
        counts[row] += 1
    return counts
