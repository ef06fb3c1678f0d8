"""What a batch and a layer of the triton backend can look like, for tests in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.attention_cases import Ragged, make_case
from tests.helpers.triton_cases import SEGMENT_TOKENS, assert_like_reference, make_spec

BATCHES = {
    "decodes": [Ragged(0), Ragged(70), Ragged(31)],
    "one decode": [Ragged(64)],
    "prefills": [Ragged(0, 18), Ragged(50, 5)],
    "mixed": [Ragged(33), Ragged(0, 17), Ragged(40, 3), Ragged(7, 1)],
    "resumed": [Ragged(50, 1, 37), Ragged(45, 9, 45), Ragged(60, 5, 33)],
}
WINDOWS = [1, SEGMENT_TOKENS - 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, 15, 17, 3 * SEGMENT_TOKENS]
RULES = [("full", 0), *(("window", window) for window in WINDOWS), ("chunk", 24), ("chunk", SEGMENT_TOKENS)]
FACTORS: dict[str, list[Any]] = {
    # All RULES are below, at every edge.
    "rule": [("full", 0), ("window", 1), ("window", SEGMENT_TOKENS + 1), ("chunk", 24)],
    "head_dims": [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (24, 40)],
    "batch": list(BATCHES),
    "heads": [(1, 1), (4, 1), (6, 2), (3, 3), (20, 1)],
    "page_tokens": [1, 16, 32, 64, 128, 3],
    # Of K and V, and of queries.
    "dtypes": [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float16),
    ],
    "kv_scales": [(1.0, 1.0), (0.25, 16.0)],
    "softcap": [None, 0.7, 30.0],
    "with_sinks": [False, True],
    "scale": [None, 0.3],
    "num_null_columns": [0, 2],
}


def check(row: dict[str, Any]) -> None:
    num_heads, num_kv_heads = row["heads"]
    k_dim, v_dim = row["head_dims"]
    dtype, query_dtype = row["dtypes"]
    spec = make_spec(*row["rule"], num_kv_heads=num_kv_heads, k_dim=k_dim, v_dim=v_dim, itemsize_bytes=dtype.itemsize)
    names = ("page_tokens", "kv_scales", "softcap", "with_sinks", "scale", "num_null_columns")
    case = make_case(
        spec,
        BATCHES[row["batch"]],
        num_heads=num_heads,
        dtype=dtype,
        query_dtype=query_dtype,
        **{name: row[name] for name in names},
    )
    assert_like_reference(case)


def label(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())
