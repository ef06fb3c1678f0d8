"""K and V in 8 bits: how they are stored, read and scaled, by every backend that keeps them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from lamella.attention.choice import choose_backend
from lamella.attention.contract import AttentionBackend, AttentionParams
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.attention.triton import shapes
from lamella.attention.triton.shapes import unpacked_mantissa
from lamella.errors import ConfigError
from lamella.kv_cache.layout import build_layout
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case, nan_arena
from tests.helpers.fp8_format import FORMATS, nearest_codes, rounded, values_of_codes
from tests.helpers.triton_cases import DEVICE, assert_like_reference, make_spec, run_on_device, small_backend

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    "torch": TorchBackend(),
    "triton": small_backend(),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
both_formats = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


def run(case: AttentionCase, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    return run_on_device(case, backend) if backend is BACKENDS["triton"] else case.run(backend)


def interesting_floats(dtype: torch.dtype) -> np.ndarray:
    """float32: every float16, and what lies around the format's numbers and half way between them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = values_of_codes(dtype)[: FORMATS[dtype][1] + 1]
    edges = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    edges = np.concatenate([np.nextafter(edges, np.float32(-1)), edges, np.nextafter(edges, np.float32(1e30))])
    others = np.array([1e30, 3e38, np.inf, np.nan, 1e-40, 1e-45, 0.0, 464.0, 465.0, 61440.0, 65536.0], dtype=np.float32)
    return np.concatenate([halves, edges, -edges, others, -others])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # signalling NaNs
@both_formats
@every_backend
def test_every_float_is_stored_as_the_nearest_number(backend: AttentionBackend, dtype: torch.dtype) -> None:
    floats = interesting_floats(dtype)
    num_heads = 32
    num_tokens = -(-len(floats) // (num_heads * 64))
    floats = np.resize(floats, num_tokens * num_heads * 64)
    spec = make_spec("window", 1, num_kv_heads=num_heads, k_dim=64, v_dim=64, itemsize_bytes=1)
    case = make_case(spec, [Ragged(0, num_tokens)], num_heads=num_heads, page_tokens=num_tokens, dtype=dtype)
    new = torch.from_numpy(floats.copy()).view(num_tokens, num_heads, 64)
    case = dataclasses.replace(case, new_keys=new, new_values=-new)
    arena = case.arena.to(DEVICE) if backend is BACKENDS["triton"] else case.arena
    cache = case.cache(backend, arena)
    metadata = dataclasses.replace(case.metadata, slot_mapping=case.metadata.slot_mapping.to(arena.device))
    backend.write_kv(cache, new.to(arena.device), -new.to(arena.device), metadata)
    page = int(case.metadata.block_tables[0, 0])
    for pages, written in ((cache.keys, floats), (cache.values, -floats)):
        codes = pages[page].contiguous().cpu().view(torch.uint8).flatten().numpy()
        expected = nearest_codes(written, dtype)
        is_nan = np.isnan(written)
        np.testing.assert_array_equal(codes[~is_nan], expected[~is_nan])
        np.testing.assert_array_equal(codes[is_nan] & 0x7F, 0x7F)  # of either sign


@pytest.mark.parametrize("num_new", [1, 2], ids=["decode", "prefill"])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@both_formats
@every_backend
def test_every_code_is_read_as_its_number(
    backend: AttentionBackend, dtype: torch.dtype, query_dtype: torch.dtype, num_new: int
) -> None:
    """A window of one token: the output is the stored V, times its scale."""
    spec = make_spec("window", 1, k_dim=16, v_dim=256, itemsize_bytes=1)
    case = make_case(
        spec,
        [Ragged(3, num_new, num_cached_new=num_new)],
        num_heads=1,
        page_tokens=4,
        dtype=dtype,
        query_dtype=query_dtype,
        kv_scales=(1.0, 0.25),
    )
    cache = case.cache(ReferenceBackend(), case.arena)
    last = case.requests[0].seq_len - 1
    page = int(case.metadata.block_tables[0, last // 4 - case.metadata.first_blocks[0]])
    values = torch.from_numpy(values_of_codes(dtype))
    codes = torch.arange(256, dtype=torch.uint8).where(values.isfinite(), 0)
    cache.values.view(torch.uint8)[page, last % 4, 0] = codes
    out, _ = run(case, backend)
    expected = (values.where(values.isfinite(), 0) / 4).to(query_dtype)
    torch.testing.assert_close(out[-1, 0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_scales", [(37.5, 0.0123), (0.0031, 250.0)], ids=str)
@both_formats
@every_backend
def test_scales_far_from_one(backend: AttentionBackend, dtype: torch.dtype, kv_scales: tuple[float, float]) -> None:
    """K and V that their scales bring into range, one key and one value beyond it; against a softmax over what the
    format can hold."""
    k_scale, v_scale = kv_scales
    spec = make_spec("full", num_kv_heads=2, k_dim=16, v_dim=8, itemsize_bytes=1)
    case = make_case(
        spec,
        [Ragged(0, 1), Ragged(0, 21)],
        num_heads=4,
        page_tokens=4,
        dtype=dtype,
        kv_scales=kv_scales,
        scale=0.25 / k_scale,
    )
    generator = torch.Generator().manual_seed(3)
    new_keys = torch.randn(22, 2, 16, generator=generator) * k_scale
    new_values = torch.randn(22, 2, 8, generator=generator) * v_scale
    new_keys[4, 0, 0], new_values[9, 1, 3] = -1e6 * k_scale, 1e6 * v_scale
    case = dataclasses.replace(case, new_keys=new_keys, new_values=new_values)
    out, _ = run(case, backend)

    keys = rounded(new_keys / k_scale, dtype) * k_scale
    values = rounded(new_values / v_scale, dtype) * v_scale
    assert values.abs().max() == torch.finfo(dtype).max * v_scale
    for row in range(22):
        seen = slice(0, 1) if row == 0 else slice(1, row + 1)
        for head in range(4):
            scores = keys[seen, head // 2] @ case.query[row, head].double() * (0.25 / k_scale)
            expected = torch.softmax(scores, 0) @ values[seen, head // 2]
            torch.testing.assert_close(
                out[row, head].double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max())
            )


@pytest.mark.parametrize("rule", [("full", 0), ("window", 12)], ids=str)
@both_formats
def test_no_number_reaches_only_queries_that_see_it(rule: tuple[str, int], dtype: torch.dtype) -> None:
    """NaN is kept, so the queries that see it give NaN; infinity is stored as a number."""
    case = make_case(make_spec(*rule, itemsize_bytes=1), [Ragged(5, 60)], num_heads=2, page_tokens=8, dtype=dtype)
    case.new_values[30], case.new_values[45] = math.nan, math.inf
    expected, _ = case.run(ReferenceBackend())
    assert expected[:30].isfinite().all()
    assert expected[30].isnan().all()
    assert rule == ("full", 0) or expected[45].isfinite().all()
    assert_like_reference(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_pages_need_no_alignment(dtype: torch.dtype) -> None:
    """Three tokens of 5 + 4 elements are a page's part of an odd number of bytes; the second layer's is behind it."""
    spec = make_spec("full", k_dim=5, v_dim=4, itemsize_bytes=dtype.itemsize)
    layout = build_layout([spec, spec], page_tokens=3, kv_sharing={})
    _, offset_bytes = layout.layer_address(1)
    assert offset_bytes == layout.unit_bytes == 3 * 9 * dtype.itemsize
    case = make_case(spec, [Ragged(0, 2)], num_heads=1, page_tokens=3, dtype=dtype)
    case = dataclasses.replace(case, unit_bytes=layout.unit_bytes, offset_bytes=offset_bytes)
    arena = nan_arena(layout.unit_bytes * 2 * (int(case.metadata.block_tables.max()) + 2))
    case = dataclasses.replace(case, arena=arena)
    assert_like_reference(case)
    _, arena = case.run(ReferenceBackend())
    begin = int(case.metadata.block_tables[0, 0]) * layout.unit_bytes + offset_bytes
    stored = arena[begin : begin + layout.unit_bytes].view(dtype).float()
    torch.testing.assert_close(stored[:10], case.new_keys.flatten().float(), rtol=0, atol=0)
    torch.testing.assert_close(stored[15:23], case.new_values.flatten().float(), rtol=0, atol=0)
    assert stored[10:15].isnan().all()


def test_where_hardware_widens_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that GPUs with e4m3 instructions get, whose pages are fp8 to the kernels."""
    monkeypatch.setattr(shapes, "unpacked_mantissa", lambda dtype, arch: unpacked_mantissa(dtype, "sm_90"))
    requests = [Ragged(33), Ragged(0, 17), Ragged(40, 3)]
    spec = make_spec("window", 24, num_kv_heads=2, k_dim=24, v_dim=16, itemsize_bytes=1)
    dtype, query_dtype = torch.float8_e4m3fn, torch.float16
    case = make_case(spec, requests, num_heads=4, page_tokens=8, dtype=dtype, query_dtype=query_dtype)
    assert_like_reference(case)


def test_where_bytes_are_unpacked_by_hand() -> None:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "default")
    assert [unpacked_mantissa(e4m3, arch) for arch in archs] == [3, 0, 0, 0, 0, 3, 3]
    assert [unpacked_mantissa(e5m2, arch) for arch in archs] == [2] * 7
    assert unpacked_mantissa(torch.float16, "sm_80") == 0


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_are_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*must be positive and finite"):
        AttentionParams(make_spec("full"), num_heads=1, scale=1.0, **{name: value})


@both_formats
def test_who_keeps_eight_bits(dtype: torch.dtype) -> None:
    spec = make_spec("full", k_dim=16, v_dim=16, itemsize_bytes=1)
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, specs=[spec], dtype=dtype).name == "torch"
    assert choose_backend("auto", torch.device("cuda"), specs=[spec], dtype=dtype).name == "triton"
    with pytest.raises(ConfigError, match=r"'native' cannot be used: .*; 'torch' and 'auto' work"):
        choose_backend("native", cpu, specs=[spec], dtype=dtype)
