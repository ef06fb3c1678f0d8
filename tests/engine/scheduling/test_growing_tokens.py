"""What functions of the caller's are given: equal to tuples that are made anew each step, and read alone."""

from __future__ import annotations

import pickle
import random
from operator import add

import numpy as np
import pytest
import torch

from lamella.engine.scheduling.growing_tokens import GrowingTokens, TokenIds


@pytest.mark.parametrize("seed", range(5))
def test_views_of_a_life_are_the_tokens_then(seed):
    """Tokens come, with drafts behind them that are kept or replaced; a step may be planned again."""
    draw = random.Random(seed)
    grown, tokens = GrowingTokens(), np.zeros(400, dtype=np.int32)
    num_known, kept = 0, []
    while num_known < 300:
        num_drafts = draw.randint(0, 4)
        tokens[num_known : num_known + num_drafts] = [draw.randrange(9) for _ in range(num_drafts)]
        for _ in range(draw.choice((1, 1, 2))):
            for length in range(num_known, num_known + num_drafts + 1):
                kept.append((grown.view(tokens[:length], num_known), tuple(tokens[:length].tolist())))
        num_accepted = draw.randint(0, num_drafts)
        tokens[num_known + num_accepted] = draw.randrange(9)
        num_known += num_accepted + 1
    for view, expected in kept:
        assert view == expected
        assert tuple(view) == expected


EXPECTED = (5, 6, 7, 8, 5, 1, 2)
VIEWS = [TokenIds([*EXPECTED, 99], 7), TokenIds([*EXPECTED[:4], 99], 4, EXPECTED[4:]), TokenIds([99], 0, EXPECTED)]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_does_what_a_tuple_does(view):
    assert len(view) == 7
    for place in range(-7, 7):
        assert view[place] == EXPECTED[place]
    for start in (None, -9, -3, -1, 0, 2, 5, 9):
        for stop in (None, -9, -2, 0, 3, 6, 9):
            for step in (None, 1, 2, -1, -3):
                assert view[start:stop:step] == EXPECTED[start:stop:step]
    assert (view.count(5), view.index(5, 1), 8 in view, 99 in view) == (2, 4, True, False)
    assert view == EXPECTED
    assert view == [*EXPECTED]
    assert view == VIEWS[0]
    assert view != EXPECTED[:-1]
    assert view != "5678512"
    assert {view: 1}[EXPECTED] == 1
    assert add(view, (3,)) == add(view, [3]) == (*EXPECTED, 3)
    assert add((3,), view) == add([3], view) == (3, *EXPECTED)
    assert (repr(view), [*reversed(view)]) == (repr(EXPECTED), [*reversed(EXPECTED)])
    assert pickle.loads(pickle.dumps(view)) == EXPECTED
    assert np.array(view).tolist() == torch.tensor(view).tolist() == [*EXPECTED]
    for place in (7, -8):
        with pytest.raises(IndexError):
            view[place]


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_can_be_written(view):
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(TypeError):
        del view[0]
    with pytest.raises(AttributeError):
        view.append(1)
    slice_of_it = view[:]
    slice_of_it += (1,)
    assert view == EXPECTED


def test_a_step_converts_only_the_tokens_that_came():
    class Counted(np.ndarray):
        converted = 0

        def tolist(self):
            Counted.converted += self.size
            return super().tolist()

    tokens, grown = np.arange(2000, dtype=np.int32).view(Counted), GrowingTokens()
    for length in range(1, 2001):
        assert grown.view(tokens[:length], length)[-1] == length - 1
    assert Counted.converted == 2000
