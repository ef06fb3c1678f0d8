"""What a step takes, as a sum of its sizes times what each costs, fitted to steps that were measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lamella.errors import ConfigError
from lamella.model_executor.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepSize:
    """num_tokens: that the step computes. num_requests: with at least one of them. kv_tokens: whose KV it reads, each
    request's counted once. attended_tokens: pairs of a new token and one that it sees, in a layer without a window."""

    num_tokens: int
    num_requests: int
    kv_tokens: int
    attended_tokens: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepSize:
        new = np.diff(plan.query_start)
        return cls(
            num_tokens=int(new.sum()),
            num_requests=len(new),
            kv_tokens=int(plan.seq_lens.sum()),
            attended_tokens=int((new * plan.seq_lens - new * (new - 1) // 2).sum()),
        )


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    size: StepSize
    seconds: float


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Of steps that the model was not fitted to: |predicted - measured| / measured, and of their sum likewise."""

    num_steps: int
    median: float
    p90: float
    of_sum: float


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """seconds = step + token * num_tokens + request * num_requests + kv_token * kv_tokens
    + attended_token * attended_tokens; all in seconds, none negative."""

    step: float
    token: float = 0.0
    request: float = 0.0
    kv_token: float = 0.0
    attended_token: float = 0.0

    def seconds(self, size: StepSize) -> float:
        return (
            self.step
            + self.token * size.num_tokens
            + self.request * size.num_requests
            + self.kv_token * size.kv_tokens
            + self.attended_token * size.attended_tokens
        )

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep]) -> StepCostModel:
        """The least sum of squared relative errors that coefficients of at least 0 give: the best of all choices of
        which ones are 0. Raises ConfigError for fewer steps than coefficients, or times that are not positive."""
        if len(steps) < len(fields(cls)) or min(step.seconds for step in steps) <= 0:
            raise ConfigError(
                f"{len(steps)} measured steps, the shortest of {min((step.seconds for step in steps), default=0)} s: "
                f"give at least {len(fields(cls))}, each of more than 0 s"
            )
        sizes = np.array([[1, *asdict(step.size).values()] for step in steps], dtype=np.float64)
        scale = sizes.max(axis=0).clip(1)
        rows = sizes / scale / np.array([[step.seconds] for step in steps])
        best, least = np.zeros(rows.shape[1]), float("inf")
        for count in range(1, rows.shape[1] + 1):
            for chosen in map(list, itertools.combinations(range(rows.shape[1]), count)):
                found = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
                error = float(((rows[:, chosen] @ found - 1) ** 2).sum())
                if found.min() >= 0 and error < least:
                    least, best = error, np.zeros(rows.shape[1])
                    best[chosen] = found
        return cls(*map(float, best / scale))

    def error(self, steps: Sequence[MeasuredStep]) -> PredictionError:
        measured = np.array([step.seconds for step in steps])
        predicted = np.array([self.seconds(step.size) for step in steps])
        relative = np.abs(predicted - measured) / measured
        return PredictionError(
            num_steps=len(steps),
            median=float(np.median(relative)),
            p90=float(np.quantile(relative, 0.9)),
            of_sum=float(abs(predicted.sum() - measured.sum()) / measured.sum()),
        )


def fit_and_check(steps: Sequence[MeasuredStep]) -> tuple[StepCostModel, PredictionError]:
    """A model of all steps, and the error of one fitted to every second step at the others."""
    return StepCostModel.fit(steps), StepCostModel.fit(steps[::2]).error(steps[1::2])


def write_steps(steps: Sequence[MeasuredStep], path: str | Path) -> None:
    objects = [{**asdict(step.size), "seconds": step.seconds} for step in steps]
    Path(path).write_text(json.dumps(objects, indent=1) + "\n", encoding="utf-8")


def read_steps(path: str | Path) -> list[MeasuredStep]:
    """Raises ConfigError for a file that `write_steps` would not have written."""
    names = [field.name for field in fields(StepSize)]
    try:
        objects = json.loads(Path(path).read_text(encoding="utf-8"))
        return [MeasuredStep(StepSize(*(int(one[name]) for name in names)), float(one["seconds"])) for one in objects]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"costs={str(path)!r} cannot be read as measured steps ({error!r}); "
            f"give a JSON list of objects with {', '.join(names)} and seconds, as `measure` writes it"
        ) from error
