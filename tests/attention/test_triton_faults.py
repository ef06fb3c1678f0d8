"""Faults planted in the kernels, one at a time: each must show in a case that the kernels as they are pass."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lamella.attention.triton as kernels
from lamella.attention.contract import AttentionBackend, attend
from lamella.attention.triton.backend import TritonBackend
from lamella.attention.triton.tuning import Tile
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case, nan_arena
from tests.helpers.triton_cases import SEGMENT_TOKENS, assert_like_reference, by_row, make_spec, on_device

SOURCE = Path(kernels.__file__).parent
TILE = Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)


def fenced(case: AttentionCase) -> AttentionCase:
    """The case with null pages around its tables and NaN behind its arena: a faulty kernel may look there."""
    rows, width = case.metadata.block_tables.shape
    tables = torch.full((rows + 2, width + 16), -1)
    tables[1:-1, 8:-8] = case.metadata.block_tables
    return dataclasses.replace(
        case,
        arena=torch.cat([case.arena, nan_arena(1 << 16)]),
        metadata=dataclasses.replace(case.metadata, block_tables=tables[1:-1, 8:-8]),
    )


def check_case(make: Callable[[], AttentionCase]) -> Callable[[AttentionBackend], None]:
    """The check that a backend gives what the reference gives."""

    @functools.wraps(make)
    def check(backend: AttentionBackend) -> None:
        assert_like_reference(fenced(make()), backend)

    return check


@check_case
def sliding_decodes() -> AttentionCase:
    return make_case(make_spec("window", 33), [Ragged(70), Ragged(20)], num_heads=2, page_tokens=8, num_null_columns=2)


def lines_that_wrap_around(backend: AttentionBackend) -> None:
    """Decodes and prefills of windows whose tables are a device's lines, which begin again at their left end."""
    requests = [Ragged(70), Ragged(20), Ragged(5), Ragged(33, 1, 30), Ragged(44, 9)]
    case = make_case(make_spec("window", 20), requests, num_heads=2, page_tokens=4)
    assert_like_reference(by_row(case, [6, 2, 0, 5, 3]), backend)


@check_case
def long_decodes() -> AttentionCase:
    """One has 20 segments, more than are merged at a time, and its newest key is what it attends to most."""
    requests = [Ragged(20 * SEGMENT_TOKENS - 9), Ragged(40)]
    case = make_case(make_spec("full"), requests, num_heads=1, page_tokens=16, with_sinks=True)
    case.new_keys[0] = 2 * case.query[0]
    return case


@check_case
def bounded_decodes() -> AttentionCase:
    """The first has more than the segments that the backend below is given, so that its segments are longer."""
    requests = [Ragged(30 * SEGMENT_TOKENS + 5), Ragged(70)]
    return make_case(make_spec("full"), requests, num_heads=1, page_tokens=16)


@check_case
def narrow_decodes() -> AttentionCase:
    """e4m3, with scales; a new value half way between two numbers, one too large, and one that is the largest."""
    spec = make_spec("full", itemsize_bytes=1)
    requests = [Ragged(20), Ragged(0), Ragged(0)]
    case = make_case(spec, requests, num_heads=1, page_tokens=8, dtype=torch.float8_e4m3fn, kv_scales=(0.5, 4.0))
    case.new_values[:, :, 0] = torch.tensor([1.0625 * 4, 1e6, 448.0 * 4]).view(3, 1)
    return case


@check_case
def resumed_decodes() -> AttentionCase:
    return make_case(make_spec("full"), [Ragged(70, 1, 41), Ragged(9, 1, 9)], num_heads=1, page_tokens=8)


@check_case
def capped_decodes() -> AttentionCase:
    return make_case(make_spec("chunk", 24), [Ragged(40)], num_heads=2, page_tokens=8, softcap=0.7, scale=0.3)


@check_case
def uneven_heads() -> AttentionCase:
    """K and V of different widths, two KV heads of three query heads each, a query wider than KV."""
    spec = make_spec("full", num_kv_heads=2, k_dim=24, v_dim=8, itemsize_bytes=2)
    requests = [Ragged(20), Ragged(9, 12)]
    return make_case(
        spec, requests, num_heads=6, page_tokens=8, dtype=torch.float16, query_dtype=torch.float32, num_null_columns=1
    )


@check_case
def sliding_prefills() -> AttentionCase:
    requests = [Ragged(40, 30), Ragged(0, 21), Ragged(70, 9, 60)]
    return make_case(make_spec("window", 20), requests, num_heads=2, page_tokens=8, with_sinks=True, softcap=2.0)


@check_case
def poisoned_prefill() -> AttentionCase:
    """A new value that is no number; the queries before it must not notice."""
    case = make_case(make_spec("full"), [Ragged(5, 30)], num_heads=1, page_tokens=8)
    case.new_values[25] = math.nan
    return case


@check_case
def unwritten_tokens() -> AttentionCase:
    """New K and V of rows without a slot are poison: what the cache holds already is what counts."""
    case = make_case(make_spec("full"), [Ragged(9, 8, num_cached_new=3)], num_heads=1, page_tokens=4)
    case.new_keys[:3] = case.new_values[:3] = math.nan
    return case


def null_row(backend: AttentionBackend) -> None:
    """A padded row of null pages and no slot gives zeros and writes nothing.

    Page ids count from the arena's second unit here, so that page -1 and slot -1 are memory of ours: ones.
    """
    case = on_device(
        make_case(make_spec("full"), [Ragged(12), Ragged(0)], num_heads=1, page_tokens=4, units_per_page=1)
    )
    case.arena[: case.unit_bytes].view(torch.float32)[:] = 1.0
    tables, slots = case.metadata.block_tables - 1, case.metadata.slot_mapping - 4
    tables[case.metadata.block_tables < 0] = -1
    tables[1] = slots[1] = -1
    metadata = dataclasses.replace(case.metadata, block_tables=tables, slot_mapping=slots)
    cache = backend.layer_cache(
        case.arena,
        spec=case.params.spec,
        dtype=case.dtype,
        page_tokens=4,
        unit_bytes=case.unit_bytes,
        offset_bytes=case.offset_bytes + case.unit_bytes,
    )
    before = case.arena.clone()
    out = attend(backend, case.params, cache, case.query, case.new_keys, case.new_values, metadata)
    assert (out[0] != 0).all()
    assert (out[1] == 0).all()
    changed = (case.arena != before).view(-1, case.unit_bytes).any(1).nonzero()
    assert changed.tolist() == [[int(slots[0]) // 4 + 1]]


@dataclass(frozen=True, slots=True)
class Fault:
    file: str
    old: str
    new: str
    shows_in: Callable[[AttentionBackend], None]


FAULTS = {
    "window one too wide": Fault("device_functions", "position - reach + 1", "position - reach", sliding_decodes),
    "window one too narrow": Fault(
        "device_functions", "position - reach + 1", "position - reach + 2", sliding_prefills
    ),
    "chunks begin one late": Fault("device_functions", "// reach * reach", "// reach * reach + 1", capped_decodes),
    "soft-cap before scale": Fault(
        "device_functions", "tl.exp(scores * (2.0 / softcap))", "tl.exp(products * (2.0 / softcap))", capped_decodes
    ),
    "soft-cap left out in units": Fault("device_functions", "scores = softcap *", "scores =", capped_decodes),
    "null pages are read": Fault("device_functions", "present = present & (pages >= 0)", "present = present", null_row),
    "padding of a narrow head is read": Fault(
        "device_functions", "mask = mask & (columns < DIM)[None, :]", "mask = mask", uneven_heads
    ),
    "natural exponent": Fault("device_functions", "return scores * LOG2_E", "return scores", sliding_decodes),
    "last tile without a mask": Fault(
        "decode", "(positions >= first) & (positions < seq_len)", "positions >= first", sliding_decodes
    ),
    "first tile without a mask": Fault(
        "decode", "(positions >= first) & (positions < seq_len)", "positions < seq_len", sliding_decodes
    ),
    "first key ignored in decode": Fault(
        "decode", "first = tl.load(first_keys + request).to(tl.int32)", "first = seq_len * 0", resumed_decodes
    ),
    "segments do not start anew": Fault(
        "decode", "largest = tl.where(tile % segment_tiles == 0", "largest = tl.where(tile < 0", long_decodes
    ),
    "a segment's last tile is lost": Fault(
        "decode", "| (tile + 1 == end_tile)", "| (tile + 2 == end_tile)", sliding_decodes
    ),
    "long contexts have no longer segments": Fault(
        "decode", "while segment * MAX_SEGMENTS < span:", "while segment * MAX_SEGMENTS < 0:", bounded_decodes
    ),
    "half a segment is one": Fault(
        "decode", "segment_tiles = segment // BLOCK_N", "segment_tiles = SEGMENT // BLOCK_N", bounded_decodes
    ),
    "scale of K left out": Fault("decode", "params.scale * params.k_scale", "params.scale", narrow_decodes),
    "scale of V left out": Fault(
        "decode", "tl.where(total == 0.0, 1.0, total) * v_scale", "tl.where(total == 0.0, 1.0, total)", narrow_decodes
    ),
    "e4m3 with e5m2's exponents": Fault("device_functions", "half = half * 256.0", "half = half", narrow_decodes),
    "the largest number is NaN": Fault("device_functions", "magnitude == 0x7F", "magnitude >= 0x7E", narrow_decodes),
    "halves are rounded up": Fault("device_functions", "+ ((magnitude >> dropped) & 1)", "+ 1", narrow_decodes),
    "too much becomes NaN": Fault(
        "device_functions", "largest: tl.constexpr = 0x7E if", "largest: tl.constexpr = 0x7F if", narrow_decodes
    ),
    "merge without the segments' own weights": Fault(
        "decode", "tl.sum(weights[:, None] * segment_sums, 0)", "tl.sum(segment_sums, 0)", long_decodes
    ),
    "merge without decay": Fault("decode", "sums = sums * decay + ", "sums = sums + ", long_decodes),
    "merge begins at the second segment": Fault(
        "decode",
        "segments = begin + tl.arange(0, BLOCK_S)",
        "segments = begin + 1 + tl.arange(0, BLOCK_S)",
        long_decodes,
    ),
    "sink added for every segment": Fault(
        "decode",
        "total = total * decay + tl.sum(weights * segment_total, 0)",
        "total = total * decay + tl.sum(weights * segment_total, 0) + tl.exp2(tl.load(sinks + head) * LOG2_E - base)",
        long_decodes,
    ),
    "K's stride used for V": Fault(
        "decode",
        "values + pages * value_page_stride + tokens * (NUM_KV_HEADS * V_DIM)",
        "values + pages * value_page_stride + tokens * (NUM_KV_HEADS * K_DIM)",
        uneven_heads,
    ),
    "query heads dealt round robin": Fault(
        "decode", "heads = kv_head * GROUP + in_group", "heads = in_group * NUM_KV_HEADS + kv_head", uneven_heads
    ),
    "wrong slot in the page": Fault(
        "write_kv", "row = slot % PAGE_TOKENS", "row = (slot + 1) % PAGE_TOKENS", uneven_heads
    ),
    "slot -1 is written": Fault("write_kv", "if slot >= 0:", "if slot >= -1:", null_row),
    "V takes K's width": Fault("write_kv", "(element // V_DIM)", "(element // K_DIM)", uneven_heads),
    "queries see the next key": Fault(
        "prefill",
        "positions[None, :] <= query_positions",
        "positions[None, :] - 1 <= query_positions",
        sliding_prefills,
    ),
    "the diagonal is taken for inner tiles": Fault(
        "prefill", "(first_position + 1) // BLOCK_N", "(last_position + 1) // BLOCK_N", sliding_prefills
    ),
    "the window's edge is taken for inner tiles": Fault(
        "prefill",
        "tl.maximum(first_visible(last_position, reach, RULE), first_key), BLOCK_N",
        "first_key, BLOCK_N",
        sliding_prefills,
    ),
    "prior context forgotten": Fault(
        "prefill",
        "query_positions = seq_len - num_queries + query_index",
        "query_positions = query_index",
        sliding_prefills,
    ),
    "sink once per key tile": Fault(
        "prefill",
        "total = total * decay + tl.sum(weights, 1)",
        "total = total * decay + tl.sum(weights, 1) + 0.01",
        sliding_prefills,
    ),
    "weight 0 times NaN": Fault("prefill", "v = tl.where(finite, v, 0.0).to(v.dtype)", "v = v", poisoned_prefill),
    "first key ignored in prefill": Fault(
        "prefill", "first_key = tl.load(first_keys + request).to(tl.int32)", "first_key = 0", sliding_prefills
    ),
    "lines do not wrap around in lists": Fault(
        "window_indices", "line + block % table_width", "line + block", lines_that_wrap_around
    ),
    "lines do not wrap around in prefill": Fault(
        "prefill", "columns >= wrap_block, columns - table_width", "columns < 0, columns", lines_that_wrap_around
    ),
    "prefill takes a request's number for its row": Fault(
        "prefill", "tl.load(table_rows + request) * table_stride", "request * table_stride", lines_that_wrap_around
    ),
    "lists take a request's number for its row": Fault(
        "window_indices",
        "tl.load(table_rows + request) * table_stride",
        "request * table_stride",
        lines_that_wrap_around,
    ),
    "a list begins where the one before does": Fault(
        "window_indices", "range(0, request, BLOCK)", "range(0, request - 1, BLOCK)", lines_that_wrap_around
    ),
    "the last page is not listed": Fault(
        "window_indices", "tl.cdiv(seq_len, PAGE_TOKENS)", "seq_len // PAGE_TOKENS", lines_that_wrap_around
    ),
    "first key ignored in lists": Fault(
        "window_indices",
        "tl.store(window_first_keys + request, first)",
        "tl.store(window_first_keys + request, first // PAGE_TOKENS * PAGE_TOKENS)",
        lines_that_wrap_around,
    ),
    "tiles of the request before": Fault("prefill", "below = begin <= tile", "below = begin < tile", sliding_prefills),
}


CHECKS = {fault.shows_in.__name__: fault.shows_in for fault in FAULTS.values()}


def make_backend(backend_class: type[TritonBackend]) -> AttentionBackend:
    return backend_class(segment_tokens=SEGMENT_TOKENS, max_segments=24, tile=TILE, target_programs=4)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_kernels_as_they_are_pass(check: Callable[[AttentionBackend], None]) -> None:
    check(make_backend(TritonBackend))


# Every other one in the default run.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * bool(i % 3)) for i, name in enumerate(FAULTS)]
)
def test_a_planted_fault_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the package under another name, with one line changed."""
    fault = FAULTS[name]
    package = f"faulty_kernels_{list(FAULTS).index(name)}"
    (tmp_path / package).mkdir()
    for path in [*SOURCE.glob("*.py"), *SOURCE.glob("*.json")]:
        text = path.read_text(encoding="utf-8").replace("lamella.attention.triton", package)
        if path.stem == fault.file and path.suffix == ".py":
            assert fault.old in text
            text = text.replace(fault.old, fault.new)
        # What a fault leaves unwritten in a list is page 0, and no number that memory happens to hold.
        text = text.replace("metadata.seq_lens.new_empty", "metadata.seq_lens.new_zeros")
        (tmp_path / package / path.name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        backend = make_backend(importlib.import_module(f"{package}.backend").TritonBackend)
        with pytest.raises(AssertionError):
            fault.shows_in(backend)
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == package]:
            del sys.modules[module]
