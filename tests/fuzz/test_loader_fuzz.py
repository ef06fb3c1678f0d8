"""Thousands of damaged models: each is refused with ModelLoadError, or loads as other readers say it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.harness import run_mutants
from tests.fuzz.mutations import FORMATS


def check(numbers: list[int], folder: Path) -> None:
    failures, outcomes = run_mutants(numbers, folder)
    told = "\n".join(f"{number} {words}" for number, words in list(failures.items())[:40])
    assert not failures, f"{len(failures)} of {len(numbers)} mutants:\n{told}"
    assert sum(outcomes.values()) == len(numbers)
    for kind in FORMATS:  # a format whose mutants are all refused, or none, tests nothing
        assert outcomes[kind, "loaded"] > len(numbers) // 200, outcomes
        assert outcomes[kind, "refused"] > len(numbers) // 200, outcomes


@pytest.mark.timeout(900)
def test_mutants_are_refused_or_right(tmp_path):
    check(list(range(1_000)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_mutants_are_refused_or_right(tmp_path):
    check(list(range(1_000, 22_000)), tmp_path)
