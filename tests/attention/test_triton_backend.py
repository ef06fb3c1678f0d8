"""TritonBackend gives what the float64 reference gives, over everything that a batch and a layer can look like."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella.attention.contract import attend
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.reference import ReferenceBackend
from lamella.attention.triton.backend import TritonBackend
from lamella.attention.triton.prefill import prefill
from lamella.errors import InvariantError
from tests.helpers.attention_cases import Ragged, make_case, make_metadata
from tests.helpers.pairwise import pairwise
from tests.helpers.triton_cases import (
    SEGMENT_TOKENS,
    TILE,
    assert_like_reference,
    make_spec,
    on_device,
    run_on_device,
    small_backend,
)
from tests.helpers.triton_factors import BATCHES, FACTORS, RULES, check, label


def count(record_property: Any, batch: str) -> None:
    """Kernels that one case runs: the write, decode with its merge, prefill."""
    requests = BATCHES[batch]
    has_decode = requests[0].num_new == 1
    has_prefill = requests[-1].num_new > 1 or len({request.num_new for request in requests}) > 1
    record_property("kernel_cases", 1 + 2 * has_decode + has_prefill)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_every_pair_of_choices(row: dict[str, Any], record_property: Any) -> None:
    check(row)
    count(record_property, row["batch"])


PRODUCT = [
    {
        "softcap": None,
        "with_sinks": True,
        "scale": None,
        "num_null_columns": 1,
        "heads": (4, 2),
        "kv_scales": (0.5, 2.0),
    }
    | dict(zip(("rule", "head_dims", "batch", "page_tokens", "dtypes"), choices, strict=True))
    for choices in itertools.product(
        *(FACTORS[name] for name in ("rule", "head_dims", "batch", "page_tokens", "dtypes"))
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("row", PRODUCT[::11], ids=label)  # an eleventh: 11 divides no factor, so every triple occurs
def test_many_combinations(row: dict[str, Any], record_property: Any) -> None:
    check(row)
    count(record_property, row["batch"])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_requests_at_every_edge(rule: tuple[str, int]) -> None:
    """Contexts around page, tile, segment and window ends, decoded in one batch; chunks that begin and end there."""
    reach = rule[1] or SEGMENT_TOKENS
    edges = sorted({0, 15, 16, reach - 1, reach, reach + 1, 2 * SEGMENT_TOKENS - 1, 2 * SEGMENT_TOKENS})
    assert_like_reference(make_case(make_spec(*rule), [Ragged(edge) for edge in edges], num_heads=1, page_tokens=8))
    chunks = [Ragged(edge, 2 + 7 * (i % 3)) for i, edge in enumerate(edges[1::2])]
    assert_like_reference(make_case(make_spec(*rule), chunks, num_heads=1, page_tokens=8))


@pytest.mark.parametrize("rule", [("full", 0), ("window", 12), ("chunk", 24)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_no_number_reaches_only_queries_that_see_it(rule: tuple[str, int], bad: float) -> None:
    case = make_case(make_spec(*rule), [Ragged(5, 60)], num_heads=2, page_tokens=8)
    case.new_values[30] = bad
    case.new_keys[31] = math.nan
    expected, _ = case.run(ReferenceBackend())
    actual, _ = run_on_device(case, small_backend())
    assert expected[:30].isfinite().all()
    assert not expected[30:].isfinite().all()
    finite = expected.isfinite()
    torch.testing.assert_close(actual[finite], expected[finite], rtol=2e-5, atol=2e-5)
    assert not actual[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_query_is_not_rounded(dtype: torch.dtype) -> None:
    spec = make_spec("window", 20, num_kv_heads=2, itemsize_bytes=2)
    case = make_case(spec, BATCHES["mixed"], num_heads=4, page_tokens=16, dtype=dtype, query_dtype=torch.float32)
    expected, _ = case.run(ReferenceBackend())
    actual, _ = run_on_device(case, small_backend())
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def decodes_alone(metadata: AttentionMetadata, rows: list[int]) -> AttentionMetadata:
    """The decode requests `rows` as a batch of their own, in that order; one may be there twice."""

    def host(name: str) -> np.ndarray:
        return getattr(metadata, f"{name}_host")[rows]

    return make_metadata(
        page_tokens=metadata.page_tokens,
        num_decodes=len(rows),
        query_start=np.arange(len(rows) + 1),
        seq_lens=host("seq_lens"),
        first_blocks=host("first_blocks"),
        first_keys=host("first_keys"),
        block_tables=host("block_tables"),
        slot_mapping=metadata.slot_mapping[rows].numpy(),
    )


def test_a_decoded_request_does_not_depend_on_the_batch() -> None:
    """Bit for bit: alone or not, in any row, however the segments are dealt to programs."""
    spec = make_spec("full", num_kv_heads=1, itemsize_bytes=2)
    case = make_case(
        spec, [Ragged(17), Ragged(200), Ragged(35)], num_heads=2, page_tokens=16, dtype=torch.float16, with_sinks=True
    )
    everyone, arena = run_on_device(case, small_backend(target_programs=1))
    case.arena.copy_(arena)
    for target_programs in (4, 9, 1000):
        again, _ = run_on_device(case, small_backend(target_programs=target_programs))
        assert torch.equal(again, everyone)
    for requests in ([1], [2, 1], [1, 1, 0, 2]):
        moved = dataclasses.replace(case, metadata=decodes_alone(case.metadata, requests), query=case.query[requests])
        backend = small_backend(target_programs=5)
        cache_case = on_device(moved)
        out = torch.empty_like(cache_case.query)
        backend.decode(
            cache_case.params, cache_case.cache(backend, cache_case.arena), cache_case.query, cache_case.metadata, out
        )
        assert torch.equal(out.cpu(), everyone[requests])


def test_prefill_takes_decode_rows_too() -> None:
    spec = make_spec("window", 33, num_kv_heads=2)
    case = make_case(spec, [Ragged(40), Ragged(0), Ragged(20, 9), Ragged(3, 1)], num_heads=6, page_tokens=16)
    expected, arena = case.run(ReferenceBackend())
    moved = on_device(dataclasses.replace(case, arena=arena))
    out = torch.empty_like(moved.query)
    cache = moved.cache(small_backend(), moved.arena)
    prefill(moved.params, cache, moved.query, moved.metadata, out, tile=TILE, first_request=0)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("seq_len", [0, 1])
def test_padded_rows_read_nothing_and_give_zeros(seq_len: int) -> None:
    """A row of null pages and no slot, as a captured graph's unused rows are."""
    case = make_case(make_spec("full"), [Ragged(40), Ragged(0)], num_heads=2, page_tokens=8)
    expected, expected_arena = make_case(make_spec("full"), [Ragged(40), Ragged(0)], num_heads=2, page_tokens=8).run(
        ReferenceBackend()
    )
    metadata = case.metadata
    metadata.block_tables[1] = -1
    metadata.slot_mapping[1] = -1
    metadata.seq_lens[1] = seq_len
    case.new_keys[1] = case.new_values[1] = case.query[1] = math.nan
    actual, arena = run_on_device(case, small_backend())
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-5, atol=2e-5)
    assert (actual[1] == 0).all() or seq_len == 1
    assert not actual[1].any()
    differs = (arena != expected_arena).nonzero()
    assert len(differs) > 0  # the row's K and V, which the reference wrote
    assert (arena[differs] == 0xFF).all()


def test_new_keys_may_be_views_and_wider_than_the_cache() -> None:
    """A slice of the fused q, k, v projection, in float32, into float16 pages; values that float16 rounds."""
    spec = make_spec("full", num_kv_heads=2, k_dim=24, v_dim=8, itemsize_bytes=2)
    case = make_case(spec, [Ragged(3), Ragged(0, 10)], num_heads=2, page_tokens=4, dtype=torch.float16)
    fused = torch.randn(11, 5, 24, generator=torch.Generator().manual_seed(1))
    case = dataclasses.replace(case, new_keys=fused[:, 1:3], new_values=fused[:, 3:, 16:])
    assert not torch.equal(case.new_keys, case.new_keys.half().float())
    _, expected = case.run(ReferenceBackend())
    _, actual = run_on_device(case, small_backend())
    assert torch.equal(actual, expected)


def test_inputs_may_be_transposed_views() -> None:
    case = make_case(make_spec("full"), [Ragged(3), Ragged(0, 10)], num_heads=2, page_tokens=4)
    names = ("query", "new_keys", "new_values")
    views = {name: getattr(case, name).permute(2, 1, 0).contiguous().permute(2, 1, 0) for name in names}
    assert all(view.stride(-1) != 1 for view in views.values())
    assert_like_reference(dataclasses.replace(case, **views))


def test_tokens_without_a_slot_are_not_written() -> None:
    requests = [Ragged(3), Ragged(30, 1, num_cached_new=1), Ragged(0, 20), Ragged(9, 8, num_cached_new=3)]
    case = make_case(make_spec("full"), requests, num_heads=2, page_tokens=4)
    without = case.metadata.slot_mapping < 0
    assert int(without.sum()) == 4
    expected = case.run(ReferenceBackend())
    case.new_keys[without] = case.new_values[without] = math.nan
    actual = run_on_device(case, small_backend())
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-5, atol=2e-5)


def test_pages_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    """In a sparse file, so that no memory is taken. Offsets of 32 bits would wrap."""
    spec = make_spec("full", itemsize_bytes=2)
    case = make_case(spec, [Ragged(20), Ragged(3, 5)], num_heads=1, page_tokens=16, dtype=torch.float16)
    expected, _ = case.run(ReferenceBackend())
    unit_bytes = 1 << 30
    ids = case.metadata.block_tables_host
    moved_ids = {int(page): 5 + i for i, page in enumerate(sorted({*ids.ravel().tolist()} - {-1}))}
    arena = torch.from_file(str(tmp_path / "arena"), shared=True, size=9 * unit_bytes, dtype=torch.uint8)
    page_bytes = 16 * spec.token_bytes
    for page, moved in moved_ids.items():
        begin = page * case.unit_bytes + case.offset_bytes
        arena[moved * unit_bytes : moved * unit_bytes + page_bytes] = case.arena[begin : begin + page_bytes]
    tables = torch.tensor([[moved_ids.get(int(page), -1) for page in row] for row in ids])
    assert int(tables.max()) * unit_bytes // 2 > 1 << 31
    slots = case.metadata.slot_mapping
    slots = torch.tensor([moved_ids[int(slot) // 16] * 16 + int(slot) % 16 for slot in slots])
    metadata = dataclasses.replace(
        case.metadata, block_tables=tables, block_tables_host=tables.numpy(), slot_mapping=slots
    )
    backend = small_backend()
    cache = backend.layer_cache(
        arena, spec=spec, dtype=torch.float16, page_tokens=16, unit_bytes=unit_bytes, offset_bytes=0
    )
    actual = attend(backend, case.params, cache, case.query, case.new_keys, case.new_values, metadata)
    torch.testing.assert_close(actual, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("requests", [[Ragged(40)], [Ragged(40, 3)]], ids=["decode", "prefill"])
def test_a_table_that_starts_above_the_window_is_refused(requests: list[Ragged]) -> None:
    case = make_case(make_spec("window", 9), requests, num_heads=2, page_tokens=4)
    case.metadata.first_blocks_host[0] += 1
    with pytest.raises(InvariantError, match="a table must cover every block"):
        case.run(small_backend())


def test_the_tuning_tables_tiles_give_the_same() -> None:
    """The tiles, segments and grids that the engine runs with."""
    spec = make_spec("window", 300, num_kv_heads=2, k_dim=64, v_dim=64)
    case = make_case(spec, [Ragged(600), Ragged(3), Ragged(250, 70)], num_heads=4, page_tokens=16, with_sinks=True)
    assert_like_reference(case, TritonBackend())
