"""The measured stream is one: prompts are taken as they are needed, and memory is looked at all the way."""

from __future__ import annotations

import benchmark_generator


def test_a_run_takes_no_more_prompts_than_its_look_ahead():
    for in_order in (False, True):
        found = benchmark_generator.run(60, 2, 8, in_order)
        assert found["first_at"] == 8
        assert [finished for finished, _ in found["memory"]] == list(range(1, 61))
        assert found["seconds"] > 0


def test_growth_is_that_of_the_last_two_thirds():
    assert benchmark_generator.growth({"memory": [(1, 5.0), (2, 9.0), (3, 10.0)]}) == 1.0
