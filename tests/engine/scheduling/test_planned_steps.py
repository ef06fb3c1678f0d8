"""Where rows are when a planned step has run, and the step without some of them: row by row."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.planned_steps import PlannedStep, Reached
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import StepResult
from tests.helpers.made_requests import make_request

# Row 2 decodes, row 0 computes the last 4 tokens of its prompt, row 3 a chunk of 3 that is not its last.
STEP = PlannedStep(
    rows=np.array([2, 0, 3]), num_new=np.array([1, 4, 3]), sampled_rows=np.array([2, 0]), admitted=frozenset({3})
)


def make_rows():
    rows = RequestRows(5, 32)
    for name, num_tokens, num_computed in (("a", 9, 5), ("b", 4, 4), ("c", 6, 5), ("d", 20, 0)):
        rows.put(make_request(name, range(num_tokens)), num_computed)
    return rows


def test_without_a_planned_step_what_is_processed_is_reached():
    rows = make_rows()
    reached = Reached.after(rows, None)
    assert reached.num_computed.tolist() == [5, 4, 5, 0, 0]
    assert reached.num_tokens.tolist() == [9, 4, 6, 20, 0]
    assert reached.token_sources is None


def test_a_planned_step_moves_its_rows_and_nobody_else():
    rows = make_rows()
    reached = Reached.after(rows, STEP)
    assert reached.num_computed.tolist() == [9, 4, 6, 3, 0]
    assert reached.num_tokens.tolist() == [10, 4, 7, 20, 0]
    assert reached.token_sources.tolist() == [1, -1, 0, -1, -1]
    assert rows.num_computed.tolist() == [5, 4, 5, 0, 0], "what is processed stays"
    assert rows.num_tokens.tolist() == [9, 4, 6, 20, 0]


def test_rows_whose_prompts_a_step_computes():
    assert STEP.prompt_rows == {0, 3}
    last_token = PlannedStep(np.array([1]), np.array([1]), np.array([1]), frozenset({1}))
    assert last_token.prompt_rows == {1}


def test_a_step_without_those_who_leave():
    result = StepResult(token_ids=np.array([70, 71]), logprobs={}, unusable={1: "NaN"})
    step, left = STEP.without([2], result)
    assert step.rows.tolist() == [0, 3]
    assert step.num_new.tolist() == [4, 3]
    assert step.sampled_rows.tolist() == [0]
    assert left.token_ids.tolist() == [71]
    assert left.unusable == {0: "NaN"}
    step, left = STEP.without([0, 3], result)
    assert (step.rows.tolist(), step.sampled_rows.tolist()) == ([2], [2])
    assert (left.token_ids.tolist(), left.unusable) == ([70], {})
