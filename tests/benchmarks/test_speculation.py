"""What the benchmark of speculation sends, and the distance that it reports."""

from __future__ import annotations

import random

import pytest

from speculation.functions import LEAST_CHANGED_LINES, LEAST_LINES, MOST_LINES, make_edits
from speculation.rounds import code_in, edit_distance
from speculation.tasks import make_tasks


def test_functions_are_python_of_the_length_that_is_said_and_always_the_same():
    edits = make_edits(30)
    assert len({edit.source for edit in edits}) == 30
    assert edits == make_edits(30)
    for edit in edits:
        compile(edit.source, "function", "exec")
        assert LEAST_LINES <= len(edit.source.splitlines()) <= MOST_LINES
        assert edit.num_lines >= LEAST_CHANGED_LINES


def test_every_task_has_its_prompts():
    tasks = make_tasks(5)
    assert list(tasks) == ["code edit", "summary", "chat", "JSON"]
    assert all(len(task.prompts) == len(task.sources) == 5 for task in tasks.values())


def by_recursion(first, second):
    if not first or not second:
        return len(first) + len(second)
    return min(
        by_recursion(first[1:], second) + 1,
        by_recursion(first, second[1:]) + 1,
        by_recursion(first[1:], second[1:]) + (first[0] != second[0]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_edit_distance_is_the_fewest_changes(seed):
    draw = random.Random(seed)
    first, second = ([draw.randrange(3) for _ in range(draw.randint(0, 6))] for _ in range(2))
    assert edit_distance(first, second) == by_recursion(first, second)


def test_code_is_what_stands_in_the_first_block():
    assert code_in("Here:\n```python\na = 1\n```\nand ```b```") == "a = 1\n"
    assert code_in("a = 1") == "a = 1"
