"""How many replicas a trace needs at a latency, for each size of a replica's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_replay.simulated_replicas import ClusterResult
from lamella.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Target:
    """The share `quantile` ("p50", "p90" or "p99") of requests gets its first token and its answer within these
    seconds; None: no limit."""

    quantile: str = "p90"
    first_token_seconds: float | None = None
    answer_seconds: float | None = None

    def is_met(self, result: ClusterResult) -> bool:
        pairs = ((result.first_token, self.first_token_seconds), (result.answer, self.answer_seconds))
        return all(most is None or getattr(found, self.quantile) <= most for found, most in pairs)


@dataclass(frozen=True, slots=True)
class Choice:
    """result: of the fewest replicas of this memory that meet the target, None where no number up to the limit does.
    reason: why not. num_tried: simulations run."""

    budget_bytes: int
    result: ClusterResult | None
    reason: str | None
    num_tried: int


def fewest_replicas(
    run: Callable[[int], ClusterResult], target: Target, *, budget_bytes: int, most_replicas: int
) -> Choice:
    """Doubles until the target is met, then halves the gap, which takes it that more replicas are no slower; the number
    found meets the target, and the largest smaller number that was tried does not.

    run: the simulation of so many replicas."""
    tried: dict[int, ClusterResult] = {}

    def meets(count: int) -> bool:
        tried[count] = run(count)
        return target.is_met(tried[count])

    failed, count = 0, 1
    try:
        while not meets(count):
            if count == most_replicas:
                return Choice(budget_bytes, None, f"not met by {most_replicas} replicas", len(tried))
            failed, count = count, min(2 * count, most_replicas)
    except CapacityError as error:
        return Choice(budget_bytes, None, str(error), len(tried))
    while count - failed > 1:
        middle = (failed + count) // 2
        if meets(middle):
            count = middle
        else:
            failed = middle
    return Choice(budget_bytes, tried[count], None, len(tried))


def cheapest(choices: Sequence[Choice]) -> Choice | None:
    """The one with the least memory in all, and of those the fewest replicas."""
    found = [
        (one.budget_bytes * one.result.num_replicas, one.result.num_replicas, one) for one in choices if one.result
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None
