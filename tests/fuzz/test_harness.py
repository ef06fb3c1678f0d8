"""The fuzz itself notices what it is there for: faults that are planted in it are reported, by number and in words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.bases import write_bases
from tests.fuzz.harness import run_mutants
from tests.fuzz.planted import AFTER
from tests.fuzz.worker import Checker

LOADED = (17, 27, 32)  # mutants of an index that load


def test_an_answer_with_one_wrong_bit_is_noticed(tmp_path):
    write_bases(tmp_path / "base")
    told: list[dict[str, Any]] = []
    (fault,) = AFTER
    checker = Checker(tmp_path / "base", tmp_path / "scratch", lambda **what: told.append(what), {LOADED[0]: fault})
    for number in LOADED:
        checker.check(number)
    verdicts = [(what["outcome"], what["problem"]) for what in told if "outcome" in what]
    assert verdicts == [("loaded", "layers.0.mlp.down_proj.weight has other values"), *[("loaded", None)] * 2]


@pytest.mark.slow
def test_every_planted_fault_is_reported_by_its_number(tmp_path):
    wanted = {
        3: ("raise", "raised KeyError"),
        5: ("crash", "ended the process, exit -11"),
        8: ("allocate", "raised RuntimeError"),
        11: ("spin", "took too long, exit -9"),
        14: ("wait", "took too long, exit -9"),
        LOADED[0]: (*AFTER, "has other values"),
    }
    numbers = list(range(20))
    faults = {number: fault for number, (fault, _) in wanted.items()}
    failures, outcomes = run_mutants(numbers, tmp_path, faults=faults, load_seconds=2.0, blocked_seconds=15.0)
    assert failures.keys() == wanted.keys()
    for number, (_, words) in wanted.items():
        assert words in failures[number]
    # Three mutants ended their worker; every other one was tried, some of them by the workers that were started again.
    assert sum(outcomes.values()) == len(numbers) - 3
