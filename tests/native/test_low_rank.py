"""Low-rank updates of some rows, bit for bit against the products that they are made of."""

import pytest
import torch

from lamella.errors import InvariantError
from lamella.native.linear import linear, pack_weight
from lamella.native.low_rank import AdaptedLayers, LowRank, StepAdapters, Up
from tests.helpers.native_layers import random

NUM_IN, NUM_OUT = 50, 90


@pytest.fixture(scope="module")
def weights():
    """down of rank 3 + 5, and what is added to the outputs 0 to 19 and 40 to 89."""
    return random(8, NUM_IN, seed=1), random(20, 3, seed=2), random(50, 5, seed=3)


@pytest.fixture(scope="module")
def update(weights):
    down, first, second = weights
    return LowRank(pack_weight(down), [Up(0, 0, pack_weight(first)), Up(40, 3, pack_weight(second))])


def expected(weights, x, y):
    down, first, second = weights
    low = linear(x, pack_weight(down))
    y = y.clone()
    y[:, :20] += linear(low[:, :3].contiguous(), pack_weight(first))
    y[:, 40:] += linear(low[:, 3:].contiguous(), pack_weight(second))
    return y


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rows", [[], [4], [0, 1, 2], [2, 3, 7], [0, 9, 30, 31, 69], list(range(70))])
def test_named_rows_get_what_they_get_alone_and_the_others_keep_their_bits(weights, update, rows, num_threads):
    torch.set_num_threads(num_threads)
    x, y = random(70, NUM_IN, seed=4), random(70, NUM_OUT, seed=5)
    found = y.clone()
    update.add_to(found, x, torch.tensor(rows, dtype=torch.int64), slice(0, NUM_OUT))
    alone = torch.cat([expected(weights, x[row : row + 1], y[row : row + 1]) for row in range(70)])
    is_named = torch.zeros(70, dtype=torch.bool)
    is_named[rows] = True
    assert torch.equal(found, torch.where(is_named[:, None], alone, y))


@pytest.mark.parametrize("columns", [slice(0, 20), slice(20, 90), slice(0, 40), slice(20, 40)])
def test_of_some_outputs_only_their_parts_are_added(weights, update, columns):
    x, y = random(9, NUM_IN, seed=4), random(9, NUM_OUT, seed=5)
    rows = torch.tensor([1, 5, 6])
    found = y[:, columns].clone()
    update.add_to(found, x, rows, columns)
    whole = y.clone()
    whole[rows] = expected(weights, x[rows], y[rows])
    assert torch.equal(found, whole[:, columns])


def test_strided_rows(weights, update):
    wide_x, wide_y = random(6, NUM_IN + 7, seed=4), random(6, NUM_OUT + 3, seed=5)
    x, y = wide_x[:, :NUM_IN], wide_y[:, :NUM_OUT]
    whole = expected(weights, x.contiguous(), y)
    update.add_to(y, x, torch.arange(6), slice(0, NUM_OUT))
    assert torch.equal(y, whole)


def test_what_would_read_or_write_elsewhere_is_refused(weights, update):
    x, y = random(4, NUM_IN), random(4, NUM_OUT)
    for rows in ([4], [-1]):
        with pytest.raises(InvariantError, match="rows"):
            update.add_to(y, x, torch.tensor(rows), slice(0, NUM_OUT))
    with pytest.raises(InvariantError, match="x has shape"):
        update.add_to(y, x[:, 1:], torch.tensor([0]), slice(0, NUM_OUT))
    with pytest.raises(InvariantError, match="y has shape"):
        update.add_to(y[:, 1:], x, torch.tensor([0]), slice(0, NUM_OUT))
    down, first, second = (pack_weight(each) for each in weights)
    for ups in ([Up(0, 6, first)], [Up(0, 0, first), Up(19, 3, second)], [Up(-1, 0, first)]):
        with pytest.raises(InvariantError, match="must not overlap, and take what there is"):
            LowRank(down, ups)
    with pytest.raises(InvariantError, match="rows"):
        StepAdapters([(AdaptedLayers([]), torch.tensor([3]))], num_rows=3)
