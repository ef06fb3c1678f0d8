"""xformers' own operators under the masks that the backend builds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lamella.attention.reference import ReferenceBackend
from lamella.attention.xformers_backend import XformersBackend, pages_per_id
from tests.helpers.attention_cases import Ragged, make_case, memo_entries, write_earlier_tokens
from tests.helpers.pairwise import pairwise
from tests.helpers.triton_cases import TOLERANCE, assert_like_reference, make_spec, on_device

pytestmark = pytest.mark.gpu

BATCHES = {
    "decodes": [Ragged(0), Ragged(700), Ragged(63), Ragged(64)],
    "first chunks": [Ragged(0, 200), Ragged(0, 2)],
    "mixed": [Ragged(330), Ragged(0), Ragged(0, 170), Ragged(400, 33), Ragged(70, 2)],
    "resumed": [Ragged(300, 1, 270), Ragged(250, 90, 250), Ragged(400, 20, 333)],
}
FACTORS: dict[str, list[Any]] = {
    "rule": [("full", 0), ("window", 1), ("window", 63), ("window", 64), ("window", 65), ("chunk", 100)],
    "batch": list(BATCHES),
    "heads": [(1, 1), (4, 1), (8, 2), (4, 4)],
    "head_dim": [64, 80, 128, 256],
    "page_tokens": [16, 64, 128],
    "dtype": [torch.float16, torch.bfloat16],
}


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices(row: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    num_heads, num_kv_heads = row["heads"]
    dim = row["head_dim"]
    spec = make_spec(*row["rule"], num_kv_heads=num_kv_heads, k_dim=dim, v_dim=dim, itemsize_bytes=2)
    case = make_case(
        spec, BATCHES[row["batch"]], num_heads=num_heads, page_tokens=row["page_tokens"], dtype=row["dtype"]
    )
    with caplog.at_level(logging.WARNING, logger="lamella.attention.xformers_backend"):
        if row["batch"] != "resumed":
            write_earlier_tokens(case)
        assert_like_reference(case, XformersBackend())
    assert not caplog.records  # xformers did it


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_float32_and_unequal_widths(dims: tuple[int, int]) -> None:
    """By xformers or, on GPUs for which it has no such operator, by triton."""
    spec = make_spec("window", 100, num_kv_heads=2, k_dim=dims[0], v_dim=dims[1], itemsize_bytes=4)
    assert_like_reference(make_case(spec, BATCHES["mixed"], num_heads=4, page_tokens=16), XformersBackend())


def test_decoding_reads_pages_where_they_lie() -> None:
    spec = make_spec("window", 100, num_kv_heads=2, k_dim=128, v_dim=128, itemsize_bytes=2)
    requests = [Ragged(500 + i) for i in range(70)]
    case = make_case(spec, requests, num_heads=8, page_tokens=64, dtype=torch.bfloat16)
    write_earlier_tokens(case)
    expected, _ = case.run(ReferenceBackend())
    moved = on_device(case)
    backend = XformersBackend()
    assert pages_per_id(moved.cache(backend, moved.arena)) is not None
    actual, _ = moved.run(backend)
    assert [name for name, _ in memo_entries(moved.metadata) if name.startswith("xformers")] == ["xformers_paged"]
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)
