"""Thousands of damaged models: each is refused with ModelLoadError, or loads as other readers say it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.harness import run_mutants
from tests.fuzz.mutations import FAMILY_FORMATS, FIRST_FAMILY_NUMBER, FORMATS


def check(numbers: list[int], folder: Path, formats: tuple[str, ...] = FORMATS) -> None:
    failures, outcomes = run_mutants(numbers, folder)
    told = "\n".join(f"{number} {words}" for number, words in list(failures.items())[:40])
    assert not failures, f"{len(failures)} of {len(numbers)} mutants:\n{told}"
    assert sum(outcomes.values()) == len(numbers)
    for kind in formats:  # a format whose mutants are all refused, or none, tests nothing
        assert outcomes[kind, "loaded"] > len(numbers) // 200, outcomes
        assert outcomes[kind, "refused"] > len(numbers) // 200, outcomes


@pytest.mark.timeout(900)
def test_mutants_are_refused_or_right(tmp_path):
    check(list(range(600)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_mutants_are_refused_or_right(tmp_path):
    check(list(range(600, 22_000)), tmp_path)


def family_numbers(first: int, end: int) -> list[int]:
    return [FIRST_FAMILY_NUMBER + index for index in range(first, end)]


def test_mutants_of_further_families_are_refused_or_right(tmp_path):
    check(family_numbers(0, 48), tmp_path, FAMILY_FORMATS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_mutants_of_further_families_are_refused_or_right(tmp_path):
    check(family_numbers(48, 2_000), tmp_path, FAMILY_FORMATS)
