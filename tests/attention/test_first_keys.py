"""Keys below a request's first key do not exist: both backends against attention over plain slices, NaN below."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.attention.contract import AttentionBackend
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case

SHAPE = {"num_kv_heads": 2, "k_dim": 8, "v_dim": 5, "itemsize_bytes": 4}
BACKENDS = [ReferenceBackend(), TorchBackend()]
REACH = 8
# Name -> (spec, the window's or chunk's first position for a query at q).
RULES = {
    "window 1": (SlidingWindowSpec(window_tokens=1, **SHAPE), lambda q: q),
    "window W-1": (SlidingWindowSpec(window_tokens=REACH - 1, **SHAPE), lambda q: q - (REACH - 2)),
    "window W": (SlidingWindowSpec(window_tokens=REACH, **SHAPE), lambda q: q - (REACH - 1)),
    "window W+1": (SlidingWindowSpec(window_tokens=REACH + 1, **SHAPE), lambda q: q - REACH),
    "long window": (SlidingWindowSpec(window_tokens=70, **SHAPE), lambda q: q - 69),
    "chunk 7": (ChunkedLocalAttentionSpec(attention_chunk_tokens=7, **SHAPE), lambda q: q - q % 7),
    "chunk W": (ChunkedLocalAttentionSpec(attention_chunk_tokens=REACH, **SHAPE), lambda q: q - q % REACH),
}


def lowest_key(rule: str, request: Ragged, query: int) -> int:
    return max(0, RULES[rule][1](query), request.first_key)


def dense(rule: str, case: AttentionCase) -> torch.Tensor:
    """float64 [T, num_heads, v_dim]: every query over the slice of contiguous K and V that it sees."""
    rows = []
    for i, request in enumerate(case.requests):
        for query in range(request.num_prior, request.seq_len):
            seen = slice(lowest_key(rule, request, query) - case.first_kept[i], query + 1 - case.first_kept[i])
            assert seen.start >= 0
            per_head = []
            for head, q in enumerate(case.query[len(rows)].double()):
                kv_head = head * case.params.spec.num_kv_heads // case.params.num_heads
                weights = (case.keys[i][seen, kv_head].double() @ q * case.params.scale).softmax(0)
                per_head.append(weights @ case.values[i][seen, kv_head].double())
            rows.append(torch.stack(per_head))
    return torch.stack(rows)


def assert_dense(rule: str, requests: list[Ragged], backend: AttentionBackend, **options) -> AttentionCase:
    case = make_case(RULES[rule][0], requests, num_heads=4, **options)
    out, _ = case.run(backend)
    torch.testing.assert_close(out.double(), dense(rule, case), rtol=1e-5, atol=1e-5)
    return case


def edge_requests() -> list[Ragged]:
    """First keys at, within and below the reach of the first query, decoded and as chunks that outgrow them."""
    firsts = [20 - below for below in (0, 1, 2, REACH - 2, REACH - 1, REACH, REACH + 1, 20)]
    return [Ragged(20, 1, first) for first in firsts] + [
        Ragged(20, num_new, first) for first in firsts for num_new in (2, REACH, 2 * REACH + 3)
    ]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("num_null_columns", [0, 3])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "window 1"])
def test_nothing_below_the_first_key_is_seen(
    rule: str, num_null_columns: int, page_tokens: int, backend: AttentionBackend
) -> None:
    case = assert_dense(rule, edge_requests(), backend, page_tokens=page_tokens, num_null_columns=num_null_columns)
    assert any(
        request.first_key > RULES[rule][1](request.num_prior) for request in case.requests if request.num_new == 1
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_window_of_one_token_sees_itself_whatever_the_first_key(backend: AttentionBackend) -> None:
    case = assert_dense("window 1", edge_requests(), backend, page_tokens=3)
    torch.testing.assert_close(case.run(backend)[0], case.new_values.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_numbers_below_the_first_key_are_not_seen_either(backend: AttentionBackend, phase: str) -> None:
    """Pages that are in the table and hold another's KV: no NaN gives a wrong read away, only the result."""
    request = Ragged(20, 1 if phase == "decode" else 6, 15)
    case = make_case(RULES["window W"][0], [request], num_heads=4, page_tokens=16)
    cache = case.cache(backend, case.arena)
    page = int(case.metadata.block_tables_host[0, 0])
    assert cache.keys[page, :15].isnan().all()
    cache.keys[page, :15] = 1.0
    cache.values[page, :15] = 1e4
    torch.testing.assert_close(case.run(backend)[0].double(), dense("window W", case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_tiles_of_a_long_chunk(backend: AttentionBackend) -> None:
    """Chunks of several tiles: some see only the first key's side, one has the window's edge pass the first key."""
    requests = [Ragged(80, 1, 60), Ragged(80, 150, 80), Ragged(80, 150, 41), Ragged(0, 130), Ragged(80, 66, 3)]
    assert_dense("long window", requests, backend, page_tokens=8)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_value_that_is_no_number_above_the_first_key(backend: AttentionBackend) -> None:
    """The slow path of prefill, which makes its tiles anew."""
    case = make_case(RULES["long window"][0], [Ragged(20, 30, 17)], num_heads=4, page_tokens=16)
    case.new_values[10] = float("nan")
    out, _ = case.run(backend)
    assert out[10:].isnan().all()
    torch.testing.assert_close(out[:10].double(), dense("long window", case)[:10], rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> list[Ragged]:
    def request(num_new: int) -> Ragged:
        num_prior = draw(st.integers(0, 40))
        below = draw(st.one_of(st.integers(0, REACH + 1), st.just(num_prior), st.integers(0, num_prior)))
        return Ragged(num_prior, num_new, max(0, num_prior - below))

    decodes = [request(1) for _ in range(draw(st.integers(0, 4)))]
    return decodes + [request(draw(st.integers(2, 80))) for _ in range(draw(st.integers(not decodes, 3)))]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@given(batches(), st.sampled_from(sorted(RULES)), st.sampled_from([1, 2, 3, 16]), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_batch(backend: AttentionBackend, requests: list[Ragged], rule: str, page_tokens: int, seed: int) -> None:
    assert_dense(rule, requests, backend, page_tokens=page_tokens, seed=seed)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_cached_positions_of_a_chunk_are_read_and_not_rewritten(page_tokens: int, backend: AttentionBackend) -> None:
    """What replay asks of a full-attention group: slot -1 for the first rows of a chunk, whose KV is in the pages.

    The recomputed K and V are poison; the pages' old contents are what attention must read.
    """
    spec: KVCacheSpec = FullAttentionSpec(**SHAPE)
    requests = [
        Ragged(11), Ragged(30, 1, num_cached_new=1), Ragged(5, 9, num_cached_new=6), Ragged(0, 7),
        Ragged(13, 70, num_cached_new=66), Ragged(6, 3, num_cached_new=3), Ragged(2, 4),
    ]  # fmt: skip
    case = make_case(spec, requests, num_heads=4, page_tokens=page_tokens)
    everything_cached = make_case(
        spec, requests, num_heads=4, page_tokens=page_tokens, num_unwritten_tokens=len(case.query)
    )
    unwritten = case.metadata.slot_mapping < 0
    assert int(unwritten.sum()) == 1 + 6 + 66 + 3
    case.new_keys[unwritten] = float("nan")
    case.new_values[unwritten] = float("nan")
    out, arena = case.run(backend)
    assert torch.equal(arena, everything_cached.arena)
    row = 0
    for i, request in enumerate(requests):
        for query in range(request.num_prior, request.seq_len):
            for head in range(4):
                weights = case.keys[i][: query + 1, head // 2].double() @ case.query[row, head].double()
                expected = (weights * case.params.scale).softmax(0) @ case.values[i][: query + 1, head // 2].double()
                torch.testing.assert_close(out[row, head].double(), expected, rtol=1e-5, atol=1e-5)
            row += 1
