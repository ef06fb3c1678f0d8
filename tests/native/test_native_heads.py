"""The largest scores of a head that is multiplied part by part, against a stable sort of all of them."""

from __future__ import annotations

import pytest
import torch

from lamella.model_executor.layers import native_heads
from lamella.model_executor.layers.native_heads import top_by_parts


def expected(scores, num_top):
    """NaN is the largest; of equals the lowest id comes first."""
    ranked = torch.where(scores.isnan(), torch.inf, scores)
    assert not (scores == torch.inf).any()
    return ranked.sort(dim=1, descending=True, stable=True).indices[:, :num_top]


@pytest.mark.parametrize("num_top", [1, 2, 7, 64])
@pytest.mark.parametrize("num_out", [64, 1000, 5000, 12_288])
@pytest.mark.parametrize("num_levels", [3, 50, 10**6])
def test_ids_and_scores(monkeypatch, num_top, num_out, num_levels):
    """Few levels make many equals, inside of parts and across them."""
    monkeypatch.setattr(native_heads, "_PART_BYTES", 1)  # parts as small as they get
    generator = torch.Generator().manual_seed(num_out + num_levels)
    scores = torch.randint(num_levels, (9, num_out), generator=generator).float()
    scores[3] = 5.0
    scores[4, num_out // 2] = float("nan")
    calls = []

    def multiply(x, start, stop):
        calls.append((start, stop))
        return scores[x[:, 0].long(), start:stop]

    ids, values = top_by_parts(multiply, torch.arange(9.0)[:, None], num_out, num_top)
    assert torch.equal(ids, expected(scores, num_top))
    assert torch.equal(values.nan_to_num(nan=-1.0), scores.gather(1, ids).nan_to_num(nan=-1.0))
    assert [start for start, _ in calls] == [0, *[stop for _, stop in calls][:-1]]
    assert calls[-1][1] == num_out
    assert len(calls) == -(-num_out // 1024)
