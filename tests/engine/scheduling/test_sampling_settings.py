"""What scheduling reads of a request's sampling is what SamplingSettings lists, and SamplingParams has all of it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import lamella.engine.scheduling
from lamella import SamplingParams
from lamella.engine.scheduling.sampling_settings import SamplingSettings
from tests.helpers.simulation import Simulation, full

LISTED = {name for name, value in vars(SamplingSettings).items() if isinstance(value, property)}
# Each another value than its neighbours, so that none can pass for another.
VALUES = {
    "temperature": 0.7,
    "top_k": 11,
    "top_p": 0.9,
    "min_p": 0.05,
    "min_tokens": 3,
    "logprobs": 2,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
}


def attributes_read() -> set[str]:
    """Of anything that scheduling calls `params`."""
    found = set()
    (folder,) = lamella.engine.scheduling.__path__
    for path in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
                if owner == "params":
                    found.add(node.attr)
    return found


def test_all_that_is_read_is_listed_and_all_that_is_listed_is_read():
    assert attributes_read() == LISTED == {*VALUES, "has_penalties"}


def test_sampling_params_have_each_of_them():
    params = SamplingParams(**VALUES)
    for name, value in VALUES.items():
        assert getattr(params, name) == value
    assert params.has_penalties


@pytest.mark.parametrize(
    ("penalties", "has_penalties"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0}, False),
    ],
    ids=str,
)
def test_penalties_are_there_where_one_is_not_neutral(penalties, has_penalties):
    assert SamplingParams(**penalties).has_penalties == has_penalties


def test_a_plan_asks_for_what_the_settings_say():
    """Of an object that has them and nothing more, beside a request that has none of them set."""
    simulation = Simulation([full()])
    simulation.add("a", [5, 6, 5], 4).params = SimpleNamespace(**VALUES, has_penalties=True)
    simulation.add("b", [7, 8], 4)
    plan = simulation.scheduler.schedule()
    sampling = plan.sampling
    assert sampling.temperature.tolist() == [0.7, 0.0]
    assert sampling.top_k.tolist() == [11, 0]
    assert sampling.top_p.tolist() == [0.9, 1.0]
    assert sampling.min_p.tolist() == [0.05, 0.0]
    assert sampling.num_logprobs.tolist() == [2, -1]
    assert list(sampling.penalties) == [0]
    penalties = sampling.penalties[0]
    assert (penalties.presence, penalties.frequency, penalties.repetition) == (0.25, -0.5, 1.5)
    assert dict(zip(penalties.token_ids.tolist(), penalties.output_counts.tolist(), strict=True)) == {5: 0, 6: 0}
