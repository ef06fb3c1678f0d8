"""TorchBackend gives what the reference gives, over everything a batch can look like."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.attention.metadata import AttentionMetadata
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.errors import InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case, make_metadata, memo_entries

# Of outputs near 1: float32 accumulation, or one rounding to the narrower output dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_backends_agree(case: AttentionCase) -> None:
    expected, expected_arena = case.run(ReferenceBackend())
    actual, actual_arena = case.run(TorchBackend())
    assert torch.equal(actual_arena, expected_arena)
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert expected.abs().max() > 0.05  # NaN or all zeros would not be a comparison


def make_spec(kind: str, reach: int, **shape: int) -> KVCacheSpec:
    shape = {"num_kv_heads": 1, "k_dim": 8, "v_dim": 8, "itemsize_bytes": 4} | shape
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "sliding":
        return SlidingWindowSpec(window_tokens=reach, **shape)
    return ChunkedLocalAttentionSpec(attention_chunk_tokens=reach, **shape)


def edge_requests(reach: int, page_tokens: int) -> list[Ragged]:
    """Decodes and prefills around each edge: start, page, window or chunk, and just past them."""
    edges = sorted({0, 1, page_tokens, reach - 1, reach, 2 * reach + page_tokens, 4 * reach + 1} - {-1})
    decodes = [Ragged(prior) for edge in edges for prior in (max(0, edge - 1), edge)]
    prefills = [Ragged(0, 1 + 2 * reach + page_tokens), Ragged(0, page_tokens + 1)]
    prefills += [Ragged(edge, 2 + j * page_tokens) for j, edge in enumerate(edges)]
    return decodes + prefills + [Ragged(reach, 1)]  # a prefill of one token


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize(("num_pages", "more_tokens"), [(0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (3, 5)])
def test_sliding_windows_at_their_edges(page_tokens: int, num_pages: int, more_tokens: int) -> None:
    reach = max(1, num_pages * page_tokens + more_tokens)
    spec = make_spec("sliding", reach, num_kv_heads=2)
    assert_backends_agree(make_case(spec, edge_requests(reach, page_tokens), num_heads=4, page_tokens=page_tokens))


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("chunk_tokens", [None, 24, 7])
def test_chunks_at_their_edges(page_tokens: int, chunk_tokens: int | None) -> None:
    reach = chunk_tokens or page_tokens
    spec = make_spec("chunked", reach)
    assert_backends_agree(make_case(spec, edge_requests(reach, page_tokens), num_heads=2, page_tokens=page_tokens))


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_full_attention(page_tokens: int) -> None:
    spec = make_spec("full", 0, num_kv_heads=2)
    assert_backends_agree(make_case(spec, edge_requests(20, page_tokens), num_heads=4, page_tokens=page_tokens))


MIXES = {
    "decode only": [Ragged(0), Ragged(37), Ragged(90), Ragged(38)],
    "one decode": [Ragged(61)],
    "prefill only": [Ragged(0, 70), Ragged(33, 130), Ragged(64, 64)],
    "mixed": [Ragged(5), Ragged(63), Ragged(0, 9), Ragged(40, 65), Ragged(7, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (6, 2), (3, 3)])
def test_batches_and_head_ratios(mix: str, kind: str, num_heads: int, num_kv_heads: int) -> None:
    spec = make_spec(kind, 20, num_kv_heads=num_kv_heads, k_dim=12, v_dim=4)
    assert_backends_agree(make_case(spec, MIXES[mix], num_heads=num_heads, page_tokens=8))


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_softcap_sinks_and_scale(kind: str, softcap: float | None, with_sinks: bool, scale: float | None) -> None:
    spec = make_spec(kind, 20, num_kv_heads=2, k_dim=16, v_dim=6)
    case = make_case(
        spec, MIXES["mixed"], num_heads=4, page_tokens=4, softcap=softcap, with_sinks=with_sinks, scale=scale
    )
    assert_backends_agree(case)


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query_dtype", [None, torch.float32])
def test_narrow_kv(kind: str, dtype: torch.dtype, query_dtype: torch.dtype | None) -> None:
    spec = make_spec(kind, 20, num_kv_heads=2, itemsize_bytes=2)
    requests = MIXES["mixed"]
    assert_backends_agree(
        make_case(spec, requests, num_heads=4, page_tokens=16, dtype=dtype, query_dtype=query_dtype, with_sinks=True)
    )


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_null_entries_below_the_window(kind: str) -> None:
    requests = [Ragged(40), Ragged(99), Ragged(0), Ragged(50, 30), Ragged(3, 40)]
    case = make_case(make_spec(kind, 9), requests, num_heads=2, page_tokens=4, num_null_columns=5)
    assert (case.metadata.block_tables_host[1, :5] == -1).all()
    assert_backends_agree(case)


def test_tokens_without_a_slot_are_not_written() -> None:
    requests = [Ragged(3), Ragged(0, 20), Ragged(9, 8)]
    case = make_case(make_spec("full", 0), requests, num_heads=2, page_tokens=4, num_unwritten_tokens=13)
    assert_backends_agree(case)
    poisoned = case.new_values.clone()
    poisoned[-13:] = float("nan")
    cache_arena = case.arena.clone()
    backend = TorchBackend()
    backend.write_kv(case.cache(backend, cache_arena), case.new_keys, poisoned, case.metadata)
    assert torch.equal(cache_arena, case.run(ReferenceBackend())[1])


def test_a_step_in_which_nothing_is_written() -> None:
    case = make_case(make_spec("full", 0), [Ragged(0, 6)], num_heads=1, page_tokens=4, num_unwritten_tokens=6)
    assert_backends_agree(case)
    assert torch.equal(case.run(TorchBackend())[1], case.arena)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_context_longer_than_one_gathered_piece(monkeypatch: pytest.MonkeyPatch, num_kv_heads: int) -> None:
    monkeypatch.setattr("lamella.attention.torch_decode.PIECE_BYTES", 64 * num_kv_heads * 8 * 4)
    spec = make_spec("full", 0, num_kv_heads=num_kv_heads)
    requests = [Ragged(prior) for prior in (300, 31, 32, 63, 64, 30, 29, 200)]
    assert_backends_agree(make_case(spec, requests, num_heads=4, page_tokens=16, with_sinks=True, softcap=2.0))


def test_score_matrices_stay_under_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.attention.torch_prefill.MAX_SCORES", 4 * 100)
    assert_backends_agree(make_case(make_spec("full", 0), [Ragged(0, 90), Ragged(70, 20)], num_heads=4, page_tokens=8))


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_reaches_only_queries_that_see_it(kind: str, bad: float) -> None:
    case = make_case(make_spec(kind, 12), [Ragged(5, 60)], num_heads=2, page_tokens=8)
    case.new_values[30] = bad
    case.new_keys[30] = float("nan")
    expected, _ = case.run(ReferenceBackend())
    actual, _ = case.run(TorchBackend())
    assert expected[:30].isfinite().all()
    assert expected[30].isnan().all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_groups_layers_share_what_the_first_derived() -> None:
    case = make_case(make_spec("sliding", 9), MIXES["mixed"], num_heads=2, page_tokens=4)
    other = make_case(make_spec("sliding", 9), MIXES["mixed"], num_heads=2, page_tokens=4, seed=0)
    expected, _ = case.run(ReferenceBackend())
    backend = TorchBackend()
    case.run(backend)
    derived = memo_entries(case.metadata)
    arena = other.arena.clone()
    cache = other.cache(backend, arena)
    backend.write_kv(cache, other.new_keys, other.new_values, case.metadata)
    out = torch.empty_like(expected)
    backend.decode(other.params, cache, other.query[:2], case.metadata, out[:2])
    backend.prefill(other.params, cache, other.query[2:], case.metadata, out[2:])
    shared = memo_entries(case.metadata)
    assert shared.keys() == derived.keys()
    assert all(shared[key] is derived[key] for key in derived)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_decoded_request_does_not_depend_on_its_neighbours() -> None:
    spec = make_spec("sliding", 40, k_dim=64, v_dim=64)
    together = make_case(spec, [Ragged(17), Ragged(300), Ragged(35), Ragged(19)], num_heads=4, page_tokens=16)
    arena = together.run(TorchBackend())[1]
    everyone, _ = together.run(TorchBackend())
    alone_metadata = _only_request(together, 2)
    backend = TorchBackend()
    out = torch.empty(1, 4, 64)
    backend.decode(together.params, together.cache(backend, arena), together.query[2:3], alone_metadata, out)
    torch.testing.assert_close(out[0], everyone[2], rtol=1e-6, atol=1e-6)


def _only_request(case: AttentionCase, request: int) -> AttentionMetadata:
    metadata = case.metadata
    rows = slice(request, request + 1)
    return make_metadata(
        page_tokens=metadata.page_tokens,
        num_decodes=1,
        query_start=metadata.query_start_host[:2],
        seq_lens=metadata.seq_lens_host[rows],
        first_blocks=metadata.first_blocks_host[rows],
        block_tables=metadata.block_tables_host[rows],
        slot_mapping=metadata.slot_mapping.numpy()[rows],
    )


@pytest.mark.parametrize("requests", [[Ragged(40)], [Ragged(40, 3)]], ids=["decode", "prefill"])
def test_a_table_that_starts_above_the_window_is_refused(requests: list[Ragged]) -> None:
    case = make_case(make_spec("sliding", 9), requests, num_heads=2, page_tokens=4)
    case.metadata.first_blocks_host[0] += 1
    with pytest.raises(InvariantError, match="a table must cover every block"):
        case.run(TorchBackend())


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    kind = draw(st.sampled_from(["full", "sliding", "chunked"]))
    page_tokens = draw(st.sampled_from([1, 2, 3, 16, 64]))
    reach = draw(st.integers(1, 80))
    num_kv_heads = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    spec = make_spec(
        kind,
        reach,
        num_kv_heads=num_kv_heads,
        k_dim=draw(st.sampled_from([4, 8, 20])),
        v_dim=draw(st.sampled_from([4, 8, 12])),
        itemsize_bytes=dtype.itemsize,
    )
    priors = st.integers(0, 150)
    decodes = [Ragged(prior) for prior in draw(st.lists(priors, max_size=6))]
    prefills = [Ragged(*pair) for pair in draw(st.lists(st.tuples(priors, st.integers(2, 90)), max_size=3))]
    return make_case(
        spec,
        decodes + prefills or [Ragged(draw(priors))],
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        page_tokens=page_tokens,
        dtype=dtype,
        softcap=draw(st.sampled_from([None, 1.5, 30.0])),
        with_sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.1])),
        units_per_page=draw(st.integers(1, 5)),
        num_null_columns=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_batch(case: AttentionCase) -> None:
    assert_backends_agree(case)
