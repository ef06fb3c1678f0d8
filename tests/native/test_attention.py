"""NativeBackend gives what the reference gives. Everything that was never written is NaN."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.attention.choice import choose_backend
from lamella.attention.native_backend import NativeBackend, native_supports
from lamella.attention.reference import ReferenceBackend
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.native.attention import AttentionKernels
from lamella.native.library import SWITCH, NativeLibrary, load_library
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case

PAGES = [16, 32, 64, 128]


@pytest.fixture(scope="module")
def backend(native_library: NativeLibrary) -> NativeBackend:
    return NativeBackend(AttentionKernels(native_library))


def make_spec(kind: str, reach: int = 0, **shape: int) -> KVCacheSpec:
    shape = {"num_kv_heads": 1, "k_dim": 16, "v_dim": 16, "itemsize_bytes": 4} | shape
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "sliding":
        return SlidingWindowSpec(window_tokens=reach, **shape)
    return ChunkedLocalAttentionSpec(attention_chunk_tokens=reach, **shape)


def assert_agrees(backend: NativeBackend, spec: KVCacheSpec, requests: list[Ragged], **options) -> AttentionCase:
    """Outputs as the reference's, and the arena as one that the test's own index formula has filled."""
    expected, _ = make_case(spec, requests, **options).run(ReferenceBackend())
    case = make_case(spec, requests, panels=True, **options)
    actual, arena = case.run(backend)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.05  # NaN or all zeros would not be a comparison
    all_tokens = {"num_unwritten_tokens": len(case.query)}
    assert torch.equal(arena, make_case(spec, requests, panels=True, **(options | all_tokens)).arena)
    return case


def edge_requests(reach: int, page_tokens: int) -> list[Ragged]:
    """Decodes and prefills around each edge: start, page, window or chunk, and just past them."""
    edges = sorted({0, 1, page_tokens, reach - 1, reach, 2 * reach + page_tokens, 4 * reach + 1} - {-1})
    decodes = [Ragged(prior) for edge in edges for prior in (max(0, edge - 1), edge)]
    prefills = [Ragged(0, 1 + 2 * reach + page_tokens), Ragged(0, page_tokens + 1)]
    prefills += [Ragged(edge, 2 + j * 11) for j, edge in enumerate(edges)]
    return decodes + prefills + [Ragged(reach, 1)]  # a prefill of one token


@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("reach", [1, 2, 15, 16, 17, 127, 128, 129])
def test_sliding_windows_at_their_edges(backend: NativeBackend, reach: int, page_tokens: int) -> None:
    requests = edge_requests(reach, page_tokens)
    assert_agrees(backend, make_spec("sliding", reach), requests, num_heads=2, page_tokens=page_tokens)


@pytest.mark.parametrize("page_tokens", [16, 48])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 24, 128, 130])
def test_chunks_at_their_edges(backend: NativeBackend, chunk_tokens: int, page_tokens: int) -> None:
    requests = edge_requests(chunk_tokens, page_tokens)
    assert_agrees(backend, make_spec("chunked", chunk_tokens), requests, num_heads=4, page_tokens=page_tokens)


MIXES = {
    "decode only": [Ragged(0), Ragged(37), Ragged(290), Ragged(38)],
    "one decode": [Ragged(161)],
    "prefill only": [Ragged(0, 150), Ragged(33, 110), Ragged(64, 64)],
    "mixed": [Ragged(5), Ragged(163), Ragged(0, 9), Ragged(140, 65), Ragged(7, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (8, 2), (8, 1), (14, 2), (200, 1)])
def test_batches_and_head_ratios(
    backend: NativeBackend, num_heads: int, num_kv_heads: int, kind: str, mix: str
) -> None:
    spec = make_spec(kind, 40, num_kv_heads=num_kv_heads, k_dim=48, v_dim=32)
    assert_agrees(backend, spec, MIXES[mix], num_heads=num_heads, page_tokens=32)


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("scale", [None, 0.9, 3.0])
def test_softcap_sinks_and_scale(
    backend: NativeBackend, kind: str, softcap: float | None, with_sinks: bool, scale: float | None
) -> None:
    spec = make_spec(kind, 140, num_kv_heads=2, v_dim=48)
    options = {"softcap": softcap, "with_sinks": with_sinks, "scale": scale}
    assert_agrees(backend, spec, MIXES["mixed"], num_heads=4, page_tokens=64, **options)


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
def test_nothing_below_the_first_key_is_seen(backend: NativeBackend, kind: str, page_tokens: int) -> None:
    firsts = [150 - below for below in (0, 1, 16, 39, 40, 41, 150)]
    requests = [Ragged(150, 1, first) for first in firsts]
    requests += [Ragged(150, num_new, first) for first in firsts for num_new in (2, 60)]
    assert_agrees(backend, make_spec(kind, 40), requests, num_heads=4, page_tokens=page_tokens, num_null_columns=2)


@pytest.mark.parametrize("num_new", [1, 20])
def test_numbers_outside_what_is_seen_are_not_seen_either(backend: NativeBackend, num_new: int) -> None:
    """Another's KV below the first key, under the window and after the end: no NaN gives a wrong read away."""
    case = make_case(make_spec("sliding", 60), [Ragged(200, num_new, 170)], num_heads=2, page_tokens=128, panels=True)
    expected, _ = case.run(backend)
    unwritten = case.arena.view(torch.float32).isnan()
    case.arena.view(torch.float32)[unwritten] = 1e4
    actual, _ = case.run(backend)
    assert torch.equal(actual, expected)
    assert actual.abs().max() < 100


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [1, 30, 61])
def test_what_is_no_number_reaches_only_queries_that_see_it(
    backend: NativeBackend, kind: str, bad: float, at: int
) -> None:
    """Of four query heads a tile: rows of one register tile differ in what they see."""
    case = make_case(make_spec(kind, 12), [Ragged(5, 90)], num_heads=4, page_tokens=16, panels=True)
    plain = make_case(make_spec(kind, 12), [Ragged(5, 90)], num_heads=4, page_tokens=16)
    for one in (case, plain):
        one.new_values[at] = bad
    actual, _ = case.run(backend)
    expected, _ = plain.run(ReferenceBackend())
    assert expected.isfinite().all(-1).all(-1).any()
    assert not expected[at].isfinite().any()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_key_that_is_no_number_makes_none_of_what_sees_it(backend: NativeBackend) -> None:
    case = make_case(make_spec("sliding", 12), [Ragged(5, 90)], num_heads=4, page_tokens=16, panels=True)
    clean, _ = case.run(backend)
    case.new_keys[30] = float("nan")
    actual, _ = case.run(backend)
    assert actual[30:42].isnan().all()
    assert torch.equal(actual[:30], clean[:30])
    assert torch.equal(actual[42:], clean[42:])


def test_tokens_without_a_slot_are_not_written(backend: NativeBackend) -> None:
    requests = [Ragged(3), Ragged(30, 1, num_cached_new=1), Ragged(0, 20), Ragged(9, 80, num_cached_new=70)]
    case = make_case(make_spec("full"), requests, num_heads=2, page_tokens=32, num_unwritten_tokens=5, panels=True)
    expected, written = case.run(backend)
    unwritten = case.metadata.slot_mapping < 0
    assert int(unwritten.sum()) == 1 + 70 + 5
    case.new_keys[unwritten] = float("nan")
    case.new_values[unwritten] = float("nan")
    actual, arena = case.run(backend)
    assert torch.equal(arena, written)
    assert torch.equal(actual, expected)
    assert_agrees(backend, make_spec("full"), requests, num_heads=2, page_tokens=32, num_unwritten_tokens=5)


def test_a_request_without_new_tokens_has_no_rows(backend: NativeBackend) -> None:
    case = make_case(make_spec("full"), MIXES["mixed"], num_heads=2, page_tokens=16, panels=True)
    expected, arena = case.run(backend)
    metadata = case.metadata
    host = {
        "query_start_host": np.insert(metadata.query_start_host, 3, metadata.query_start_host[3]),
        "seq_lens_host": np.insert(metadata.seq_lens_host, 3, 500),
        "first_blocks_host": np.insert(metadata.first_blocks_host, 3, 0),
        "first_keys_host": np.insert(metadata.first_keys_host, 3, 0),
        "block_tables_host": np.insert(metadata.block_tables_host, 3, -1, axis=0),
    }
    out = torch.empty_like(expected)
    with_empty = dataclasses.replace(metadata, **host)
    backend.attend_all(case.params, case.cache(backend, arena), case.query, with_empty, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("requests", [[Ragged(40)], [Ragged(40, 3)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("fault", ["starts late", "ends early", "null inside"])
def test_a_table_without_a_page_that_is_seen_is_refused(
    backend: NativeBackend, fault: str, requests: list[Ragged]
) -> None:
    case = make_case(make_spec("sliding", 40), requests, num_heads=2, page_tokens=16, panels=True)
    tables = case.metadata.block_tables_host
    if fault == "starts late":
        case.metadata.first_blocks_host[0] += 1
    elif fault == "ends early":
        case = dataclasses.replace(case, metadata=dataclasses.replace(case.metadata, block_tables_host=tables[:, :-1]))
    else:
        tables[0, 1] = -1
    with pytest.raises(InvariantError, match="a table must cover every block"):
        case.run(backend)


def test_pages_can_be_read_token_by_token(backend: NativeBackend) -> None:
    spec = make_spec("full", num_kv_heads=2, k_dim=32, v_dim=48)
    case = make_case(spec, [Ragged(0, 70)], num_heads=2, page_tokens=32, panels=True)
    _, arena = case.run(backend)
    cache = case.cache(backend, arena)
    pages = case.metadata.block_tables[0]
    assert torch.equal(cache.keys[pages].reshape(-1, 2, 32)[:70], case.keys[0])
    assert torch.equal(cache.values[pages].reshape(-1, 2, 48)[:70], case.values[0])


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_keys_and_values_may_be_slices_of_one_tensor(backend: NativeBackend, num_tokens: int) -> None:
    spec = make_spec("full", num_kv_heads=2, k_dim=32, v_dim=16)
    case = make_case(spec, [Ragged(0, num_tokens)], num_heads=2, page_tokens=16, panels=True)
    _, expected = case.run(backend)
    qkv = torch.cat([case.query.flatten(1), case.new_keys.flatten(1), case.new_values.flatten(1)], dim=1)
    _, key, value = qkv.split([64, 64, 32], dim=1)
    arena = case.arena.clone()
    backend.write_kv(case.cache(backend, arena), key.view(-1, 2, 32), value.view(-1, 2, 16), case.metadata)
    assert torch.equal(arena, expected)


@st.composite
def batches(draw: st.DrawFn) -> tuple[KVCacheSpec, list[Ragged], dict]:
    def request(num_new: int) -> Ragged:
        num_prior = draw(st.integers(0, 280))
        below = draw(st.one_of(st.just(num_prior), st.integers(0, num_prior)))
        return Ragged(num_prior, num_new, num_prior - below, draw(st.sampled_from([0, 0, num_new // 2])))

    num_kv_heads = draw(st.integers(1, 3))
    spec = make_spec(
        draw(st.sampled_from(["full", "sliding", "chunked"])),
        draw(st.integers(1, 200)),
        num_kv_heads=num_kv_heads,
        k_dim=draw(st.sampled_from([16, 32, 80])),
        v_dim=draw(st.sampled_from([16, 48])),
    )
    decodes = [request(1) for _ in range(draw(st.integers(0, 4)))]
    prefills = [request(draw(st.integers(2, 150))) for _ in range(draw(st.integers(not decodes, 3)))]
    options = {
        "num_heads": num_kv_heads * draw(st.integers(1, 9)),
        "page_tokens": draw(st.sampled_from([*PAGES, 48])),
        "softcap": draw(st.sampled_from([None, 1.5, 30.0])),
        "with_sinks": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.1])),
        "units_per_page": draw(st.integers(1, 5)),
        "num_null_columns": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    return spec, decodes + prefills, options


@given(batches())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_batch(backend: NativeBackend, batch: tuple[KVCacheSpec, list[Ragged], dict]) -> None:
    spec, requests, options = batch
    assert_agrees(backend, spec, requests, **options)


@pytest.mark.parametrize(
    ("spec", "dtype", "page_tokens", "reason"),
    [
        (make_spec("full"), torch.bfloat16, 16, "bfloat16"),
        (make_spec("full"), torch.float32, 24, "page_size=24"),
        (make_spec("full", v_dim=40), torch.float32, 16, "40"),
        (make_spec("full", k_dim=8), torch.float32, 16, "heads of 8"),
        (KVCacheSpec(num_kv_heads=1, k_dim=16, v_dim=16, itemsize_bytes=4), torch.float32, 16, "KVCacheSpec"),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(
    backend: NativeBackend, spec: KVCacheSpec, dtype: torch.dtype, page_tokens: int, reason: str
) -> None:
    assert reason in native_supports(spec, dtype, page_tokens)
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    layout = {"page_tokens": page_tokens, "unit_bytes": 1 << 14, "offset_bytes": 0}
    with pytest.raises(ConfigError, match=reason):
        backend.layer_cache(arena, spec=spec, dtype=dtype, **layout)
    assert native_supports(make_spec("sliding", 7), torch.float32, 16) is None


@pytest.fixture
def fresh_choice():
    """What is loaded once and kept is loaded anew, before and after."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("native_library", "fresh_choice")
def test_the_choice_of_a_backend(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cpu = torch.device("cpu")
    monkeypatch.delenv(SWITCH, raising=False)
    assert choose_backend("auto", cpu).name == choose_backend("native", cpu).name == "native"
    assert "lamella_kernels_" in caplog.text
    assert choose_backend("torch", cpu).name == "torch"
    assert choose_backend("auto", torch.device("meta")).name == "torch"
    with pytest.raises(ConfigError, match="not on cuda"):
        choose_backend("native", torch.device("cuda"))
    specs = [make_spec("full"), make_spec("sliding", 7)]
    assert choose_backend("auto", cpu, specs=specs, dtype=torch.float32, page_tokens=32).name == "native"
    caplog.clear()
    assert choose_backend("auto", cpu, specs=specs, page_tokens=24).name == "torch"
    assert "page_size=24 is no multiple of 16" in caplog.text
    assert choose_backend("auto", cpu, specs=specs, dtype=torch.bfloat16).name == "torch"
    with pytest.raises(ConfigError, match="page_size=24 is no multiple of 16; 'torch' and 'auto' work"):
        choose_backend("native", cpu, specs=specs, page_tokens=24)


@pytest.mark.usefixtures("native_library", "fresh_choice")
def test_the_choice_without_a_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(SWITCH, "0")
    assert choose_backend("auto", torch.device("cpu")).name == "torch"
    assert "switched off" in caplog.text
    assert "no native kernels" in caplog.text
    with pytest.raises(ConfigError, match="compiled at installation"):
        choose_backend("native", torch.device("cpu"))
