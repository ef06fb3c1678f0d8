"""The oracle against torch's own attention on plain contiguous tensors, and against arithmetic by hand."""

import math

import pytest
import torch

from lamella.attention.reference import ReferenceBackend, visible_mask
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import Ragged, make_case, make_metadata

SHAPE = {"num_kv_heads": 2, "k_dim": 8, "v_dim": 5, "itemsize_bytes": 4}
SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(**SHAPE),
    SlidingWindowSpec(window_tokens=1, **SHAPE),
    SlidingWindowSpec(window_tokens=4, **SHAPE),
    SlidingWindowSpec(window_tokens=11, **SHAPE),
    ChunkedLocalAttentionSpec(attention_chunk_tokens=4, **SHAPE),
    ChunkedLocalAttentionSpec(attention_chunk_tokens=7, **SHAPE),
]
REQUESTS = [Ragged(0), Ragged(3), Ragged(4), Ragged(29), Ragged(0, 13), Ragged(9, 8), Ragged(27, 2)]


def dense_mask(spec: KVCacheSpec, seq_len: int) -> torch.Tensor:
    """bool [seq_len, seq_len], from a picture of the rule: a band, or blocks, of the lower triangle."""
    lower = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    if isinstance(spec, SlidingWindowSpec):
        return lower & ~lower.tril(-spec.window_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_tokens
        blocks = torch.block_diag(*[torch.ones(chunk, chunk)] * (seq_len // chunk + 1))
        return lower & blocks[:seq_len, :seq_len].bool()
    return lower


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 4, 6])
def test_equals_dense_attention_without_pages(spec: KVCacheSpec, page_tokens: int) -> None:
    case = make_case(spec, REQUESTS, num_heads=6, page_tokens=page_tokens, scale=0.3, num_null_columns=2)
    out, _ = case.run(ReferenceBackend())
    row = 0
    for i, request in enumerate(REQUESTS):
        kept = case.first_kept[i]
        mask = dense_mask(spec, request.seq_len)[request.num_prior :, kept:]
        # Nothing visible lies below first_kept.
        assert int(mask.sum()) == int(dense_mask(spec, request.seq_len)[request.num_prior :].sum())
        expected = torch.nn.functional.scaled_dot_product_attention(
            case.query[row : row + request.num_new].double().transpose(0, 1),
            case.keys[i].double().transpose(0, 1).repeat_interleave(3, dim=0),
            case.values[i].double().transpose(0, 1).repeat_interleave(3, dim=0),
            attn_mask=mask,
            scale=0.3,
        )
        torch.testing.assert_close(
            out[row : row + request.num_new].double(), expected.transpose(0, 1), rtol=1e-6, atol=1e-6
        )
        row += request.num_new


def test_three_tokens_by_hand() -> None:
    """Window 2, scale 1/2, cap 2, sink log 3; K = 1, 3, -1 and V = 10, 20, 40; the query is 2 at position 2."""
    spec = SlidingWindowSpec(num_kv_heads=1, k_dim=1, v_dim=1, itemsize_bytes=4, window_tokens=2)
    case = make_case(
        spec, [Ragged(0, 3)], num_heads=1, page_tokens=2, softcap=2.0, with_sinks=True, scale=0.5, units_per_page=1
    )
    assert case.params.sinks is not None
    case.params.sinks.copy_(torch.tensor([math.log(3.0)]))
    case.query.copy_(torch.tensor([1.0, 0.0, 2.0]).view(3, 1, 1))
    case.new_keys.copy_(torch.tensor([1.0, 3.0, -1.0]).view(3, 1, 1))
    case.new_values.copy_(torch.tensor([10.0, 20.0, 40.0]).view(3, 1, 1))
    out, _ = case.run(ReferenceBackend())

    # Position 0 sees itself: score 0.5, capped 2 tanh(0.25) = 0.489837, e^ = 1.632051.
    first = 1.632051 * 10 / (1.632051 + 3)
    # Position 1 has query 0: both scores are 0, so 1, 1 and the sink's 3.
    second = (10 + 20) / (1 + 1 + 3)
    # Position 2 sees keys 3 and -1: scores 3 and -1, capped 1.810297 and -0.924234, e^ 6.112259 and 0.396834.
    third = (6.112259 * 20 + 0.396834 * 40) / (6.112259 + 0.396834 + 3)
    torch.testing.assert_close(out.flatten(), torch.tensor([first, second, third]), rtol=1e-5, atol=1e-5)


def test_write_goes_to_the_slot_and_nowhere_else() -> None:
    """The helper writes pages by byte offsets; a batch without prior context must give the same bytes."""
    spec = SlidingWindowSpec(**SHAPE, window_tokens=5)
    requests = [Ragged(0), Ragged(0, 9), Ragged(0, 4)]
    written = make_case(spec, requests, num_heads=2, page_tokens=4, num_unwritten_tokens=14)
    case = make_case(spec, requests, num_heads=2, page_tokens=4)
    assert case.arena.eq(0xFF).all()
    assert torch.equal(case.run(ReferenceBackend())[1], written.arena)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_kv_is_rounded_once_when_written(dtype: torch.dtype) -> None:
    spec = FullAttentionSpec(num_kv_heads=1, k_dim=4, v_dim=4, itemsize_bytes=2)
    case = make_case(spec, [Ragged(0, 2)], num_heads=1, page_tokens=2, dtype=dtype, query_dtype=torch.float32)
    value = torch.tensor([1.0009765625 / 3] * 4)
    backend = ReferenceBackend()
    cache = case.cache(backend, case.arena)
    backend.write_kv(cache, torch.ones(2, 1, 4), value.expand(2, 1, 4), case.metadata)
    out = torch.empty(2, 1, 4)
    backend.prefill(case.params, cache, case.query, case.metadata, out)
    # Weights sum to 1, so the output is the stored value, in the query's own dtype.
    torch.testing.assert_close(out, value.to(dtype).float().expand(2, 1, 4), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_rules_agree_with_first_visible(spec: KVCacheSpec) -> None:
    positions = torch.arange(40)
    mask = visible_mask(spec, positions, positions)
    for query in range(40):
        assert mask[query].nonzero()[:, 0].tolist() == list(range(spec.first_visible(query), query + 1))


def test_a_table_that_lacks_a_visible_page_is_refused() -> None:
    case = make_case(SPECS[3], [Ragged(20)], num_heads=2, page_tokens=4)
    metadata = case.metadata
    short = metadata.block_tables_host.copy()
    short[0, 0] = -1
    broken = make_metadata(
        page_tokens=4,
        num_decodes=1,
        query_start=metadata.query_start_host,
        seq_lens=metadata.seq_lens_host,
        first_blocks=metadata.first_blocks_host,
        block_tables=short,
        slot_mapping=metadata.slot_mapping.numpy(),
    )
    backend = ReferenceBackend()
    with pytest.raises(InvariantError, match="lacks keys that positions"):
        backend.decode(case.params, case.cache(backend, case.arena), case.query, broken, torch.empty(1, 2, 5))


def test_a_spec_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no visibility rule"):
        visible_mask(KVCacheSpec(**SHAPE), torch.arange(2), torch.arange(2))
