from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.scheduling.speculation.step_costs import StepCosts


def test_between_sizes_and_beyond_them_it_rises_evenly():
    costs = StepCosts([1, 5, 9], [2.0, 4.0, 10.0])
    assert costs.seconds(np.array([1, 3, 5, 7, 9, 11])).tolist() == [2, 3, 4, 7, 10, 13]
    assert costs.largest_size == 9


def test_one_size_alone_costs_the_same_everywhere():
    costs = StepCosts([1], [2.0])
    costs.note(1, 50.0)
    assert costs.seconds(np.array([1, 100])).tolist() == [2, 2]


def test_steps_teach_what_they_take():
    costs = StepCosts([1, 5, 9], [2.0, 4.0, 10.0])
    for _ in range(200):
        costs.note(5, 6.0)
        costs.note(3, 4.0)
    found = costs.seconds(np.array([1, 3, 5, 9]))
    assert found[1:3] == pytest.approx([4.0, 6.0], rel=0.02)
    assert found[3] == 10.0, "nobody has tried it"


def test_a_step_that_was_held_up_teaches_little():
    costs = StepCosts([1, 5], [2.0, 4.0])
    costs.note(5, 4000.0)
    assert costs.seconds(np.array([1, 5])).tolist() == pytest.approx([2.0, 4.4])
    costs.note(6, 0.001)
    assert costs.seconds(np.array([5])).tolist() == pytest.approx([4.4]), "larger than all that was measured"
