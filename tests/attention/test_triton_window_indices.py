"""The device's window indices against the host's, and rows that are advanced against rows that are built anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.attention.metadata import window_kv_indices as host_window_kv_indices
from lamella.attention.triton.window_indices import WindowRows, window_kv_indices
from lamella.errors import ConfigError
from lamella.kv_cache.spec import KVCacheSpec
from tests.helpers.attention_cases import Ragged, make_case, make_metadata
from tests.helpers.triton_cases import make_spec, metadata_on_device, on_device

RULES = [("full", 0), ("window", 1), ("window", 7), ("window", 8), ("window", 9), ("window", 300), ("chunk", 7)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 8])
def test_as_the_host_lists_them(rule: tuple[str, int], page_tokens: int, record_property: Any) -> None:
    requests = [Ragged(prior) for prior in (0, 1, 6, 7, 8, 40, 310)] + [Ragged(20, 1, 18), Ragged(5, 3)]
    case = make_case(make_spec(*rule), requests, num_heads=1, page_tokens=page_tokens, num_null_columns=2)
    expected_indptr, expected = host_window_kv_indices(case.params.spec, case.metadata)
    indptr, indices = window_kv_indices(case.params.spec, on_device(case).metadata)
    assert torch.equal(indptr.cpu(), expected_indptr)
    assert torch.equal(indices[: int(indptr[-1])].cpu(), expected)
    record_property("kernel_cases", 2)


def test_more_requests_than_one_block_of_the_prefix_sum() -> None:
    case = make_case(make_spec("window", 3), [Ragged(i % 5) for i in range(300)], num_heads=1, page_tokens=8)
    expected, _ = host_window_kv_indices(case.params.spec, case.metadata)
    spec = case.params.spec
    # Only the sum: its 300 gathers are other tests' business.
    assert torch.equal(window_kv_indices(spec, on_device(case).metadata)[0].cpu(), expected)


def test_no_decodes_give_no_indices() -> None:
    case = on_device(make_case(make_spec("window", 4), [Ragged(0, 3)], num_heads=1, page_tokens=2))
    indptr, indices = window_kv_indices(case.params.spec, case.metadata)
    assert indptr.tolist() == [0]
    assert indices.numel() == 0


def step_metadata(spec: KVCacheSpec, seq_lens: list[int], first_keys: list[int], page_tokens: int) -> AttentionMetadata:
    """Block b of request i is page 100 * i + b; tables begin where the windows do."""
    lengths = np.array(seq_lens, dtype=np.int64)
    lowest = np.maximum(spec.first_visible_each(lengths - 1), first_keys)
    first_blocks = lowest // page_tokens
    width = int(((lengths - 1) // page_tokens - first_blocks).max()) + 1
    tables = 100 * np.arange(len(seq_lens))[:, None] + first_blocks[:, None] + np.arange(width)
    tables[first_blocks[:, None] + np.arange(width) > (lengths[:, None] - 1) // page_tokens] = -1
    return make_metadata(
        page_tokens=page_tokens,
        num_decodes=len(seq_lens),
        query_start=np.arange(len(seq_lens) + 1),
        seq_lens=lengths,
        first_blocks=first_blocks,
        first_keys=np.array(first_keys, dtype=np.int64),
        block_tables=tables,
        slot_mapping=np.full(len(seq_lens), -1),
    )


@pytest.mark.parametrize("rule", [rule for rule in RULES if 0 < rule[1] < 300], ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3])
def test_advanced_rows_equal_rows_built_anew(rule: tuple[str, int], page_tokens: int) -> None:
    """Through rows that fill up and are moved back: three windows' worth of steps."""
    spec = make_spec(*rule)
    seq_lens, first_keys = [1, 2, 20, 12], [0, 0, 0, 11]
    rows = None
    for _ in range(3 * rule[1] + 2):
        metadata = metadata_on_device(step_metadata(spec, seq_lens, first_keys, page_tokens))
        if rows is None:
            rows = WindowRows.build(spec, metadata)
        else:
            rows.advance(metadata)
        indptr, expected = host_window_kv_indices(spec, metadata)
        for i in range(len(seq_lens)):
            actual = rows.slots[i, int(rows.begins[i]) : int(rows.ends[i])]
            assert actual.tolist() == expected[indptr[i] : indptr[i + 1]].tolist()
        seq_lens = [seq_len + 1 for seq_len in seq_lens]


def test_full_attention_has_no_rows() -> None:
    with pytest.raises(ConfigError, match="no window to keep"):
        WindowRows.build(make_spec("full"), step_metadata(make_spec("full"), [3], [0], 2))
