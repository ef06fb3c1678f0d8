"""Lives of whole engines in which everything goes wrong that can: tests/helpers/engine_simulation.py.

A life that is wrong is named by its seed and is lived again by `LAMELLA_SIMULATION_SEED=seed pytest
tests/properties/test_simulation.py`, which shows where it goes wrong.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from lamella.engine.engine import Engine
from lamella.engine.output_processor import OutputProcessor
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.engine.step_failures import StepFailures
from tests.helpers.engine_simulation import EngineLife, problem_with
from tests.helpers.planted_faults.planting import replaced

NUM_SEEDS = 100
NUM_SLOW_SEEDS, NUM_PARTS = 10_000, 10


def lives_of(seeds) -> tuple[Counter, list[str]]:
    """What happened in all, and what was wrong."""
    happened: Counter = Counter()
    wrong = []
    for seed in seeds:
        life = EngineLife(seed)
        try:
            life.run()
        except Exception as problem:
            wrong.append(f"seed {seed}: {type(problem).__name__}: {problem}")
            continue
        stats = life.engine.stats()
        happened += Counter(
            faults=life.num_injected,
            failed_steps=stats.num_failed_steps,
            blamed=life.num_blamed,
            preemptions=stats.num_preemptions,
            aborts=sum(one.is_aborted for one in life.asked),
            short_of_memory=life.runner.num_trims,
        )
    return happened, wrong


@pytest.mark.skipif("LAMELLA_SIMULATION_SEED" in os.environ, reason="one seed is asked for")
def test_whatever_goes_wrong_each_request_gets_what_is_foretold_or_the_error_that_it_earned():
    happened, wrong = lives_of(range(NUM_SEEDS))
    assert wrong == []
    assert happened["faults"] > 2 * NUM_SEEDS
    assert happened["failed_steps"] > 3 * NUM_SEEDS
    assert happened["blamed"] > NUM_SEEDS / 3
    assert happened["preemptions"] > NUM_SEEDS
    assert happened["aborts"] > NUM_SEEDS / 2
    assert happened["short_of_memory"] > NUM_SEEDS


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_lives(part):
    size = NUM_SLOW_SEEDS // NUM_PARTS
    assert lives_of(range(part * size, (part + 1) * size))[1] == []


def test_the_seed_that_is_asked_for():
    """Of LAMELLA_SIMULATION_SEED; without it, one that had gone wrong."""
    EngineLife(int(os.environ.get("LAMELLA_SIMULATION_SEED", "305"))).run()


def _blames_another(original, self, error, suspects):
    blamed = original(self, error, suspects)
    if not blamed.guilty:
        return blamed
    *_, (name, failure) = blamed.guilty.items()
    others = [other for other in self.watched if other != name]
    return replace(blamed, guilty=dict.fromkeys(others[:1] or [name], failure))


def _runs_all(original, self, request_ids):
    return original(self, None)


def _forgets_who_is_aside(original, self, request_ids):
    if request_ids is None:
        self._aside.clear()
    original(self, request_ids)


def _never_smaller(original, self, most_tokens):
    return original(self, None)


def _gives_no_output(original, self, errors):
    ended = original(self, errors)
    self._outputs = []
    return ended


def _keeps_tokens_that_are_not_kept(original, self, *, restores):
    self._finish_finding()


def _does_not_recover(original, self, loaded):
    vars(self)["_launched"].clear()


FAULTS = {
    "another request is blamed": (StepFailures, "_after_failure_alone", _blames_another),
    "suspects do not run alone": (Scheduler, "run_only", _runs_all),
    "who waits aside is forgotten": (Scheduler, "run_only", _forgets_who_is_aside),
    "steps stay as large": (Scheduler, "limit", _never_smaller),
    "the error is lost": (OutputProcessor, "fail", _gives_no_output),
    "tokens of a failed step stay": (OutputProcessor, "settle", _keeps_tokens_that_are_not_kept),
    "a failed step is not undone": (Engine, "_recover", _does_not_recover),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault):
    with replaced(*FAULTS[fault]):
        assert any(problem_with(seed) for seed in range(NUM_SEEDS))
