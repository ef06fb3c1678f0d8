"""The window indices that decode reads, against the visibility rule spelled out key by key in dictionaries."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lamella.attention.metadata import AttentionMetadata
from lamella.attention.triton import backend as triton_backend
from lamella.attention.triton.window_indices import WindowIndices, window_kv_indices
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import Ragged, forget_memo, make_case, make_metadata
from tests.helpers.triton_cases import (
    DEVICE,
    assert_like_reference,
    by_row,
    make_spec,
    metadata_on_device,
    on_device,
    small_backend,
)

NULL_PAGE = -1


def sees(spec: KVCacheSpec, query: int, key: int) -> bool:
    if isinstance(spec, SlidingWindowSpec):
        return 0 <= query - key < spec.window_tokens
    assert isinstance(spec, ChunkedLocalAttentionSpec)
    chunk = spec.attention_chunk_tokens
    return key // chunk == query // chunk and key <= query


def ring_metadata(
    pages: list[dict[int, int]],
    rows: list[int],
    seq_lens: list[int],
    first_keys: list[int],
    page_tokens: int,
    width: int,
) -> AttentionMetadata:
    """Decodes whose tables are lines of a device's, that wrap around after `width` columns. pages: block -> page of
    each request; other entries of its line are 777, which is nobody's."""
    tables = np.full((max(rows) + 2, width), 777)
    first_blocks = [min(table, default=0) for table in pages]
    host = np.full((len(rows), width), NULL_PAGE)
    for index, (row, table) in enumerate(zip(rows, pages, strict=True)):
        for block, page in table.items():
            tables[row, block % width] = page
            host[index, block - first_blocks[index]] = page
    metadata = make_metadata(
        page_tokens=page_tokens,
        num_decodes=len(rows),
        query_start=np.arange(len(rows) + 1),
        seq_lens=np.array(seq_lens),
        first_blocks=np.array(first_blocks),
        first_keys=np.array(first_keys),
        block_tables=host,
        slot_mapping=np.full(len(rows), -1),
    )
    on_a_device = {
        "table_rows": torch.tensor(rows), "first_blocks": torch.zeros(len(rows), dtype=torch.int64),
        "block_tables": torch.from_numpy(tables),
    }  # fmt: skip
    return metadata_on_device(dataclasses.replace(metadata, **on_a_device))


def positions_listed(windows: WindowIndices, index: int, seq_len: int, page_tokens: int) -> list[tuple[int, int]]:
    """(page, place in it) of the keys that a reader of the indices sees for one request, oldest first."""
    begin, end = windows.indptr[index : index + 2].tolist()
    first = int(windows.first_keys[index])
    entries = windows.indices[begin:end].tolist()
    places = [(page, offset) for page in entries for offset in range(page_tokens)]
    skipped = first % page_tokens
    return places[skipped : skipped + seq_len - first]


# Windows inside of a page, of one, over several; contexts that end before, at and behind the ends of pages and windows.
RULES = [("window", 1), ("window", 7), ("window", 16), ("window", 17), ("window", 40), ("chunk", 7), ("chunk", 32)]
SEQ_LENS = [1, 0, 7, 8, 16, 17, 33, 64, 65]


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_lists_exactly_the_visible_keys(rule: tuple[str, int], page_tokens: int, record_property: Any) -> None:
    """Rows in no order, lines that wrap around, a row without keys as in a padded graph, requests that resumed without
    their windows, a null page."""
    spec = make_spec(*rule)
    seq_lens = [*SEQ_LENS, 41, 41, 33, 20, 64]
    first_keys = [0] * len(SEQ_LENS) + [39, 40, 32, 3, 0]
    rows = [3, 3, 11, 0, 7, 1, 9, 4, 2, 12, 8, 14, 5, 6]
    most = spec.reach_tokens // page_tokens + 3
    pages: list[dict[int, int]] = []
    for index, (seq_len, first_key) in enumerate(zip(seq_lens, first_keys, strict=True)):
        lowest = min((key for key in range(seq_len) if sees(spec, seq_len - 1, key)), default=0)
        blocks = range(max(lowest, first_key) // page_tokens, -(-seq_len // page_tokens))
        pages.append({block: 1000 * index + 7 * block for block in blocks})
    pages[-1][max(pages[-1])] = NULL_PAGE
    metadata = ring_metadata(pages, rows, seq_lens, first_keys, page_tokens, most)
    windows = window_kv_indices(spec, metadata)
    assert windows.indptr[0] == 0
    for index, (seq_len, first_key) in enumerate(zip(seq_lens, first_keys, strict=True)):
        expected = [
            (pages[index][key // page_tokens], key % page_tokens)
            for key in range(first_key, seq_len)
            if sees(spec, seq_len - 1, key)
        ]
        assert positions_listed(windows, index, seq_len, page_tokens) == expected
        if page_tokens == 1:  # an entry is a token's slot
            begin, end = windows.indptr[index : index + 2].tolist()
            assert windows.indices[begin:end].tolist() == [page for page, _ in expected]
    record_property("kernel_cases", 1)


def test_more_requests_than_are_added_up_at_a_time() -> None:
    spec, lengths = make_spec("window", 3), [index % 5 for index in range(270)]
    pages = [dict.fromkeys(range(-(-length // 2)), index) for index, length in enumerate(lengths)]
    for table, length in zip(pages, lengths, strict=True):
        table.pop(0, None) if length > 4 else None
    metadata = ring_metadata(pages, list(range(270)), lengths, [0] * 270, 2, 3)
    counts = [len({key // 2 for key in range(max(0, length - 3), length)}) for length in lengths]
    assert window_kv_indices(spec, metadata).indptr.tolist() == np.cumsum([0, *counts]).tolist()


@pytest.mark.parametrize("rule", [("window", 9), ("chunk", 8)], ids=str)
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_decode_and_prefill_over_lines_that_wrap_around(rule: tuple[str, int], page_tokens: int) -> None:
    """The same batch as the reference sees by request, over a device's tables by row."""
    spec = make_spec(*rule)
    requests = [Ragged(20), Ragged(0), Ragged(13), Ragged(30, 1, 28), Ragged(17, 6), Ragged(0, 9)]
    case = make_case(spec, requests, num_heads=2, page_tokens=page_tokens, num_null_columns=1)
    assert_like_reference(by_row(case, [5, 2, 7, 0, 3, 1]), small_backend())


def test_layers_of_a_group_share_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers list once, other metadata lists again, full attention never."""
    made: list[KVCacheSpec] = []
    original = triton_backend.window_kv_indices

    def counted(spec: KVCacheSpec, metadata: AttentionMetadata) -> WindowIndices:
        made.append(spec)
        return original(spec, metadata)

    monkeypatch.setattr(triton_backend, "window_kv_indices", counted)
    backend = small_backend()
    for rule, times in ((("window", 5), 1), (("full", 0), 0)):
        case = on_device(make_case(make_spec(*rule), [Ragged(9), Ragged(3)], num_heads=1, page_tokens=4))
        cache, out = case.cache(backend, case.arena), torch.empty_like(case.query)
        for again in range(1, 3):
            for _ in range(2):
                backend.decode(case.params, cache, case.query, case.metadata, out)
            assert len(made) == again * times
            forget_memo(case.metadata)
        made.clear()
    assert out.device.type == DEVICE.type
