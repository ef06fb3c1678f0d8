"""`window_kv_indices` against the visibility rule, spelled out key by key."""

import numpy as np
import pytest

from lamella.attention.metadata import window_kv_indices
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import Ragged, make_case

SHAPE = {"num_kv_heads": 1, "k_dim": 2, "v_dim": 2, "itemsize_bytes": 4}
CONTEXTS = [0, 1, 2, 3, 6, 7, 8, 23, 24, 25, 64, 99]


def sees(spec: KVCacheSpec, query: int, key: int) -> bool:
    if isinstance(spec, SlidingWindowSpec):
        return 0 <= query - key < spec.window_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_tokens
        return key // chunk == query // chunk and key <= query
    return key <= query


@pytest.mark.parametrize("page_tokens", [1, 3, 8])
@pytest.mark.parametrize("num_null_columns", [0, 2])
@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(**SHAPE),
        *(SlidingWindowSpec(window_tokens=w, **SHAPE) for w in (1, 2, 7, 8, 9, 29)),
        *(ChunkedLocalAttentionSpec(attention_chunk_tokens=c, **SHAPE) for c in (3, 7, 8, 24)),
    ],
    ids=str,
)
def test_lists_exactly_the_visible_slots(spec: KVCacheSpec, page_tokens: int, num_null_columns: int) -> None:
    requests = [Ragged(context) for context in CONTEXTS] + [Ragged(5, 3)]  # a prefill has no part in it
    case = make_case(spec, requests, num_heads=1, page_tokens=page_tokens, num_null_columns=num_null_columns)
    metadata = case.metadata
    indptr, indices = window_kv_indices(spec, metadata)
    assert len(indptr) == len(CONTEXTS) + 1
    assert indptr[0] == 0
    for i, query in enumerate(CONTEXTS):
        expected = set()
        for key in range(query + 1):
            if sees(spec, query, key):
                page = metadata.block_tables_host[i, key // page_tokens - metadata.first_blocks_host[i]]
                assert page >= 0
                expected.add(int(page * page_tokens + key % page_tokens))
        slots = indices[indptr[i] : indptr[i + 1]].tolist()
        assert len(slots) == len(expected)
        assert set(slots) == expected
        assert slots[-1] == metadata.slot_mapping[i]  # in order: the query's own key is the last


def test_no_decodes_gives_no_indices() -> None:
    spec = SlidingWindowSpec(window_tokens=4, **SHAPE)
    case = make_case(spec, [Ragged(0, 3)], num_heads=1, page_tokens=2)
    indptr, indices = window_kv_indices(spec, case.metadata)
    assert indptr.tolist() == [0]
    assert np.asarray(indices).size == 0
