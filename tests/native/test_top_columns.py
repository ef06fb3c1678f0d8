"""The largest columns against a stable sort."""

import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.top_columns import top_columns


def make_scores(num_rows: int, num_columns: int, num_levels: int) -> torch.Tensor:
    """Few levels make many equals. Row 0 also has NaN, infinities and both zeros."""
    generator = torch.Generator().manual_seed(num_columns + num_levels)
    scores = torch.randint(-num_levels, num_levels, (num_rows, num_columns), generator=generator).float()
    special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0, float("-inf"), float("nan")])
    places = torch.randperm(num_columns, generator=generator)[: len(special)]
    scores[0, places] = special[: len(places)]
    return scores


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_columns", [1, 5, 16, 255, 257, 4096, 9001])
@pytest.mark.parametrize("num_levels", [2, 100, 10**6])
def test_is_a_stable_sort(num_columns, num_levels, num_threads):
    torch.set_num_threads(num_threads)
    scores = make_scores(5, num_columns, num_levels)
    # torch sorts NaN as the largest
    expected = scores.sort(dim=1, descending=True, stable=True)
    for k in (1, 2, 7, 64):
        values, columns = top_columns(scores, min(k, num_columns))
        assert torch.equal(columns, expected.indices[:, :k])
        assert torch.equal(values.nan_to_num(nan=1e9), expected.values[:, :k].nan_to_num(nan=1e9))


def test_rows_of_the_lowest_value_and_no_rows():
    values, columns = top_columns(torch.full((2, 300), float("-inf")), 3)
    assert torch.equal(columns, torch.tensor([[0, 1, 2]] * 2))
    assert torch.equal(values, torch.full((2, 3), float("-inf")))
    assert top_columns(torch.ones(0, 4), 2)[1].shape == (0, 2)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_there_are(k):
    with pytest.raises(ConfigError, match=f"k={k} cannot be had of 4 columns"):
        top_columns(torch.ones(2, 4), k)
