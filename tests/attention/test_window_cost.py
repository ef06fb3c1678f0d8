"""A windowed layer does the same work at any context length; counted, not timed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import AttentionCase, Ragged, forget_memo, make_case

SHAPE = {"num_kv_heads": 1, "k_dim": 4, "v_dim": 4, "itemsize_bytes": 4}
WINDOWED = [
    SlidingWindowSpec(window_tokens=64, **SHAPE),
    ChunkedLocalAttentionSpec(attention_chunk_tokens=64, **SHAPE),
]


class ElementCounter(TorchDispatchMode):
    """Counts the elements of every tensor that an operation makes or fills; views count as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.total += result.numel()
            self.largest = max(self.largest, result.numel())
        return result


def count_elements(case: AttentionCase) -> ElementCounter:
    backend = TorchBackend()
    forget_memo(case.metadata)
    cache = case.cache(backend, case.arena)
    num_decodes = case.metadata.num_decodes
    out = torch.empty(case.query.shape[0], case.params.num_heads, case.params.spec.v_dim)
    backend.write_kv(cache, case.new_keys, case.new_values, case.metadata)
    with ElementCounter() as counter:
        if num_decodes:
            backend.decode(case.params, cache, case.query[:num_decodes], case.metadata, out[:num_decodes])
        if num_decodes < case.metadata.num_requests:
            backend.prefill(case.params, cache, case.query[num_decodes:], case.metadata, out[num_decodes:])
    assert out.isfinite().all()
    return counter


@pytest.mark.parametrize("spec", WINDOWED, ids=str)
@pytest.mark.parametrize("requests", [[Ragged(0)] * 5, [Ragged(0, 150)]], ids=["decode", "prefill"])
def test_work_does_not_grow_with_context(spec: KVCacheSpec, requests: list[Ragged]) -> None:
    def at(context: int) -> AttentionCase:
        shifted = [Ragged(context + r.num_prior, r.num_new) for r in requests]
        return make_case(spec, shifted, num_heads=2, page_tokens=16)

    near, far = at(64 * 4 + 5), at(64 * 40_000 + 5)
    # The far case's arena holds pages of its window alone: there is nothing else to read.
    assert far.metadata.block_tables_host.shape == near.metadata.block_tables_host.shape
    assert far.arena.numel() < 4 * near.arena.numel()
    assert count_elements(far).total == count_elements(near).total


@pytest.mark.parametrize("spec", WINDOWED, ids=str)
@pytest.mark.parametrize("requests", [[Ragged(9000)] * 3, [Ragged(9000, 150)]], ids=["decode", "prefill"])
def test_null_columns_cost_nothing(spec: KVCacheSpec, requests: list[Ragged]) -> None:
    trimmed = make_case(spec, requests, num_heads=2, page_tokens=16)
    untrimmed = make_case(spec, requests, num_heads=2, page_tokens=16, num_null_columns=500)
    assert untrimmed.metadata.block_tables_host.shape[1] == trimmed.metadata.block_tables_host.shape[1] + 500
    assert count_elements(untrimmed).total == count_elements(trimmed).total


def test_full_attention_does_grow() -> None:
    """What the counter is worth: it sees a longer context where there is one."""
    spec = FullAttentionSpec(**SHAPE)
    short = make_case(spec, [Ragged(500)], num_heads=2, page_tokens=16)
    long = make_case(spec, [Ragged(2000)], num_heads=2, page_tokens=16)
    assert count_elements(long).total > 3 * count_elements(short).total


@pytest.mark.parametrize("spec", WINDOWED, ids=str)
def test_prefill_cost_is_linear_in_tokens(spec: KVCacheSpec) -> None:
    short = count_elements(make_case(spec, [Ragged(0, 512)], num_heads=2, page_tokens=16))
    long = count_elements(make_case(spec, [Ragged(0, 2048)], num_heads=2, page_tokens=16))
    assert long.total < 4.5 * short.total
    num_heads, tile_queries, band = 2, 64, 64 + 63
    assert long.largest <= max(num_heads * tile_queries * band, 2048 * num_heads * SHAPE["k_dim"])


def test_full_prefill_makes_no_square_matrix() -> None:
    num_tokens = 1024
    spec = FullAttentionSpec(**SHAPE)
    counter = count_elements(make_case(spec, [Ragged(0, num_tokens)], num_heads=1, page_tokens=16))
    assert counter.largest <= 64 * num_tokens < num_tokens**2


def test_score_matrices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella.attention.torch_prefill.MAX_SCORES", 5000)
    spec = FullAttentionSpec(**SHAPE)
    counter = count_elements(make_case(spec, [Ragged(400, 90)], num_heads=2, page_tokens=16))
    assert counter.largest <= 5000
