"""Attention cases on the device that the triton kernels run on: a GPU, or the CPU in the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend
from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.reference import ReferenceBackend
from lamella.attention.triton.backend import TritonBackend
from lamella.attention.triton.tuning import Tile
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.helpers.attention_cases import AttentionCase

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of outputs near 1: float32 accumulation, or roundings of weights and output to the narrower dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}
SEGMENT_TOKENS = 32
TILE = Tile(block_m=64, block_n=16, num_warps=4, num_stages=2)


def small_backend(**overrides: object) -> TritonBackend:
    """Segments of two tiles, so that short contexts have several."""
    return TritonBackend(**({"segment_tokens": SEGMENT_TOKENS, "tile": TILE, "target_programs": 4} | overrides))


def make_spec(rule: str, reach: int = 0, **shape: int) -> KVCacheSpec:
    shape = {"num_kv_heads": 1, "k_dim": 16, "v_dim": 16, "itemsize_bytes": 4} | shape
    if rule == "full":
        return FullAttentionSpec(**shape)
    if rule == "window":
        return SlidingWindowSpec(window_tokens=reach, **shape)
    return ChunkedLocalAttentionSpec(attention_chunk_tokens=reach, **shape)


def metadata_on_device(metadata: AttentionMetadata) -> AttentionMetadata:
    tensors = {
        field.name: getattr(metadata, field.name).to(DEVICE)
        for field in dataclasses.fields(metadata)
        if isinstance(getattr(metadata, field.name), torch.Tensor)
    }
    return dataclasses.replace(metadata, **tensors)


def by_row(case: AttentionCase, rows: list[int]) -> AttentionCase:
    """The case with its tables as a device has them: request i's in line rows[i], block b in column b % width. What is
    no request's is page 0, which is NaN."""
    host = case.metadata
    width = host.block_tables_host.shape[1]
    tables = torch.zeros(max(rows) + 2, width, dtype=torch.int64)
    for row, first, line in zip(rows, host.first_blocks_host.tolist(), host.block_tables_host, strict=True):
        tables[row, (first + np.arange(width)) % width] = torch.from_numpy(line)
    metadata = dataclasses.replace(
        host,
        table_rows=torch.tensor(rows),
        first_blocks=torch.zeros(len(rows), dtype=torch.int64),
        block_tables=tables,
    )
    return dataclasses.replace(case, metadata=metadata)


def on_device(case: AttentionCase) -> AttentionCase:
    """The case with every tensor that a kernel reads on DEVICE."""
    sinks = case.params.sinks
    return dataclasses.replace(
        case,
        params=dataclasses.replace(case.params, sinks=None if sinks is None else sinks.to(DEVICE)),
        arena=case.arena.to(DEVICE),
        metadata=metadata_on_device(case.metadata),
        query=case.query.to(DEVICE),
        new_keys=case.new_keys.to(DEVICE),
        new_values=case.new_values.to(DEVICE),
    )


def run_on_device(case: AttentionCase, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, arena after the write), on the CPU."""
    out, arena = on_device(case).run(backend)
    return out.cpu(), arena.cpu()


def assert_like_reference(case: AttentionCase, backend: AttentionBackend | None = None) -> None:
    expected, expected_arena = case.run(ReferenceBackend())
    actual, actual_arena = run_on_device(case, backend or small_backend())
    assert torch.equal(actual_arena, expected_arena)
    assert actual.dtype == expected.dtype
    # K and V of 8 bits are widened exactly; products have the query's precision.
    tolerance = TOLERANCE[case.query.dtype if case.dtype in FP8_MANTISSA_BITS else case.dtype]
    v_scale = case.params.v_scale
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * v_scale, equal_nan=True)
    assert expected.nan_to_num().abs().max() > 0.05 * v_scale  # NaN or all zeros would not be a comparison
