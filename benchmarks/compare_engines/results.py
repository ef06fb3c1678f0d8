"""What was measured, and the arithmetic on it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compare_engines.workloads import Workload


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, decimals: int = 2) -> str:
        return f"{self.median:.{decimals}f} ({self.least:.{decimals}f}\u2013{self.most:.{decimals}f})"


def ratios(seconds: Sequence[float], base_seconds: Sequence[float]) -> list[float]:
    """seconds / base_seconds round by round: what slows one round of a machine down slows both down.

    The lists are in the order of rounds; where one engine failed in a late round, the rounds that both have count.
    """
    return [own / base for own, base in zip(seconds, base_seconds, strict=False)]


@dataclass(slots=True)
class Measured:
    """One engine on one workload: `seconds` per round, in order, and the tokens of the last round."""

    engine: str
    workload: Workload
    start_seconds: list[float]  # the engine's, per round: shared by its workloads
    seconds: list[float] = field(default_factory=list)
    output_token_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, of the median."""
        return self.workload.total_output_tokens / statistics.median(self.seconds)


def agreement(output: Sequence[Sequence[int]], base_output: Sequence[Sequence[int]]) -> float:
    """Share of output tokens before each request's first difference. Equal weights in another order of summing differ
    at a near tie, after which greedy texts go their own ways; a low share of the first few means other work."""
    num_equal = num_all = 0
    for own, base in zip(output, base_output, strict=True):
        num_all += len(base)
        for token, base_token in zip(own, base, strict=True):
            if token != base_token:
                break
            num_equal += 1
    return num_equal / num_all


def first_token_agreement(output: Sequence[Sequence[int]], base_output: Sequence[Sequence[int]]) -> float:
    """Share of requests whose first token is the same."""
    pairs = zip(output, base_output, strict=True)
    return statistics.mean(float(own[0] == base[0]) for own, base in pairs)


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine that failed in a round (counted from 1) and was left out from then on."""

    engine: str
    round_number: int
    message: str


@dataclass(slots=True)
class EngineFacts:
    """What an engine is and says of itself. precision: "fp32" or what the weights are reduced to."""

    precision: str
    settings: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Comparison:
    """Everything of one comparison. base: the engine that the others are compared with."""

    base: str
    engines: dict[str, EngineFacts]
    measured: list[Measured]
    failures: list[Failure]
    num_rounds: int
    machine: dict[str, Any]

    def find(self, engine: str, workload: str) -> Measured | None:
        """Its figures, where it finished the workload at least once."""
        for one in self.measured:
            if (one.engine, one.workload.name) == (engine, workload) and one.seconds:
                return one
        return None

    def workloads(self) -> list[Workload]:
        return list({one.workload.name: one.workload for one in self.measured}.values())

    def ratio(self, engine: str, workload: str) -> Spread | None:
        """The engine's time over the base's; None without figures of both."""
        own, base = self.find(engine, workload), self.find(self.base, workload)
        return None if own is None or base is None else Spread.of(ratios(own.seconds, base.seconds))

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "num_rounds": self.num_rounds,
            "machine": self.machine,
            "engines": {
                name: {"precision": facts.precision, "settings": facts.settings, "versions": facts.versions}
                for name, facts in self.engines.items()
            },
            "workloads": [
                {
                    "name": workload.name,
                    "num_requests": workload.num_requests,
                    "shared_tokens": workload.shared_tokens,
                    "own_tokens": workload.own_tokens,
                    "output_tokens": workload.output_tokens,
                }
                for workload in self.workloads()
            ],
            "results": [self._result(one) for one in self.measured if one.seconds],
            "failures": [
                {"engine": one.engine, "round": one.round_number, "message": one.message} for one in self.failures
            ],
        }

    def _result(self, one: Measured) -> dict[str, Any]:
        base = self.find(self.base, one.workload.name)
        ratio = self.ratio(one.engine, one.workload.name)
        return {
            "engine": one.engine,
            "workload": one.workload.name,
            "precision": self.engines[one.engine].precision,
            "seconds": one.seconds,
            "output_tokens": one.workload.total_output_tokens,
            "start_seconds": one.start_seconds,
            "ratio_to_base": None
            if ratio is None
            else {"median": ratio.median, "least": ratio.least, "most": ratio.most},
            "token_agreement": None if base is None else agreement(one.output_token_ids, base.output_token_ids),
            "first_token_agreement": None
            if base is None
            else first_token_agreement(one.output_token_ids, base.output_token_ids),
        }
