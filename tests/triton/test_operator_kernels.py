"""The fused operators' kernels against float64 formulas, in every pair of width, dtype and number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lamella.attention.contract import LayerCache
from lamella.attention.native_backend import HeadTransform
from lamella.errors import ConfigError, InvariantError
from lamella.model_executor.layers.triton import activation, heads, norm
from tests.helpers.attention_cases import nan_arena
from tests.helpers.operator_cases import (
    Kernels,
    assert_near,
    check_activated,
    check_add_norm,
    check_gate,
    check_gated,
    check_heads,
    check_layer_norm,
    check_norm,
    check_softcap,
    norm64,
    rotated64,
)
from tests.helpers.pairwise import pairwise
from tests.helpers.triton_cases import DEVICE

KERNELS = Kernels(norm, heads, activation)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS: dict[str, list[Any]] = {"width": [1, 79, 80, 640, 1152], "num_rows": [5, 0, 1], "dtype": DTYPES}
HEADS: dict[str, list[Any]] = {
    "heads": [(4, 1), (6, 2), (3, 3), (1, 1), (20, 9), (0, 2), (5, 0)],
    "head_dim": [64, 96, 128, 256, 80, 16],
    "num_tokens": [5, 0, 1],
    "dtype": DTYPES,
    "cache_dtype": [None, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2],
    "page_tokens": [1, 3, 16],
    "has_unslotted": [False, True],
    "scales": [(1.0, 1.0), (0.3, 1.0), (1.0, 5.0), (0.001, 0.2)],
}

# What models may lack or have more: each pair of options at least once.
OTHER_ADDITIONS: dict[str, list[Any]] = {
    "has_post": [False, True],
    "has_next": [False, True],
    "bias_dtype": [None, *DTYPES],
    **ROWS,
}
OTHER_HEADS: dict[str, list[Any]] = {
    "heads": [(4, 1), (9, 3), (14, 2), (3, 3), (20, 9), (0, 2), (5, 0)],
    "dims": [(64, 64), (96, 64), (64, 128), (16, 80), (40, 24), (256, 256)],
    "rotary": ["none", "a pair", "a part", "all"],
    "has_norms": [False, True],
    "bias_dtype": [None, *DTYPES],
    "num_tokens": [5, 1],
    "dtype": DTYPES,
    "cache_dtype": [None, torch.float32, torch.float8_e4m3fn],
    "page_tokens": [1, 3, 16],
    "has_unslotted": [False, True],
}

# The interpreter computes exp in NumPy, which says when it overflows; to infinity is what the formulas ask for.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def label(row: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row.values())


@pytest.mark.parametrize("row", pairwise(ROWS), ids=label)
def test_norms(row: dict[str, Any]) -> None:
    check_norm(KERNELS, **row)
    check_add_norm(KERNELS, **row)


@pytest.mark.parametrize("row", pairwise(ROWS | {"activation": list(activation.ACTIVATIONS)}), ids=label)
def test_gated_activations(row: dict[str, Any]) -> None:
    check_gated(KERNELS, **row)


@pytest.mark.parametrize("row", pairwise(ROWS | {"has_bias": [True, False]}), ids=label)
def test_layer_norms(row: dict[str, Any]) -> None:
    check_layer_norm(KERNELS, **row)


@pytest.mark.parametrize(
    "row",
    pairwise(
        ROWS
        | {"activation": list(activation.ACTIVATIONS), "has_factor": [True, False], "bias_dtype": [None, torch.float32]}
    ),
    ids=label,
)
def test_activations_of_one_input(row: dict[str, Any]) -> None:
    check_activated(KERNELS, **row)


@pytest.mark.parametrize(
    "row",
    pairwise(
        {
            "num_gates": [1, 5, 24],
            "dim": [64, 1, 80],
            "num_rows": [5, 0, 1],
            "dtype": DTYPES,
            "activation": ["sigmoid", "softplus"],
            "has_bias": [True, False],
        }
    ),
    ids=label,
)
def test_gates_of_attention(row: dict[str, Any]) -> None:
    check_gate(KERNELS, **row)


@pytest.mark.parametrize("row", pairwise(ROWS | {"softcap": [30.0, 0.7]}), ids=label)
def test_capped_logits(row: dict[str, Any]) -> None:
    check_softcap(KERNELS, **row)


@pytest.mark.parametrize("row", pairwise(HEADS), ids=label)
def test_heads(row: dict[str, Any]) -> None:
    row = dict(row)
    num_heads, num_kv_heads = row.pop("heads")
    k_scale, v_scale = row.pop("scales")
    unslotted = [0, 2][: row["num_tokens"] // 2] if row.pop("has_unslotted") else []
    check_heads(
        KERNELS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        unslotted=unslotted,
        k_scale=k_scale,
        v_scale=v_scale,
        **row,
    )


@pytest.mark.parametrize("row", pairwise(OTHER_ADDITIONS), ids=label)
def test_additions_with_and_without_norms_and_bias(row: dict[str, Any]) -> None:
    check_add_norm(KERNELS, **row)


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(79, torch.float32), (640, torch.bfloat16), (1152, torch.float16)])
def test_gated_activations_with_bias(width: int, dtype: torch.dtype, bias_dtype: torch.dtype, activation: str) -> None:
    check_gated(KERNELS, width=width, num_rows=3, dtype=dtype, activation=activation, bias_dtype=bias_dtype)


@pytest.mark.parametrize("row", pairwise(OTHER_HEADS), ids=label)
def test_heads_with_and_without_norms_bias_and_rotary(row: dict[str, Any]) -> None:
    row = dict(row)
    num_heads, num_kv_heads = row.pop("heads")
    head_dim, v_dim = row.pop("dims")
    rotary_dim = {"none": 0, "a pair": 2, "a part": 2 * (head_dim // 5), "all": head_dim}[row.pop("rotary")]
    check_heads(
        KERNELS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        rotary_dim=rotary_dim,
        unslotted=[0, 2][: row["num_tokens"] // 2] if row.pop("has_unslotted") else [],
        **row,
    )


@pytest.mark.parametrize("rotary", [None, 4, 8])
def test_a_token_alone_has_the_bits_that_it_has_among_others(rotary: int | None) -> None:
    """With and without norms and bias, queries and pages."""
    generator = torch.Generator().manual_seed(3)
    columns = torch.randn(4, 2 * 16 + 2 * (16 + 32), generator=generator).to(DEVICE)
    bias, weight = (torch.randn(size, generator=generator).to(DEVICE) for size in (columns.shape[1], 16))
    cos, sin = (torch.randn(4, 1, rotary or 1, generator=generator).to(DEVICE) for _ in range(2))
    tables = (None, None) if rotary is None else (cos, sin)

    def moved(rows: torch.Tensor, norm_weight: torch.Tensor | None, given_bias: torch.Tensor | None) -> torch.Tensor:
        pages = [torch.zeros(4, 1, 2, dim, device=DEVICE) for dim in (16, 32)]
        queries = heads.transform_heads(
            columns[rows],
            HeadTransform(norm_weight, norm_weight, 0.1, *tables).of_rows(rows),
            num_heads=2,
            num_kv_heads=2,
            cache=LayerCache(*pages),
            slots=rows,
            bias=given_bias,
        )
        return torch.cat([queries.flatten(1), *(page.flatten(1)[rows] for page in pages)], dim=1)

    seen = []
    for norm_weight in (None, weight):
        for given_bias in (None, bias):
            together = moved(torch.arange(4, device=DEVICE), norm_weight, given_bias)
            for row in range(4):
                alone = moved(torch.tensor([row], device=DEVICE), norm_weight, given_bias)
                assert torch.equal(alone[0], together[row])
            seen.append(together)
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_rows_as_wide_as_a_program_takes() -> None:
    check_add_norm(KERNELS, width=norm.MAX_WIDTH, num_rows=1, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"rows of 16385 elements are too wide.*attention_backend='torch'"):
        norm.norm_constants(norm.MAX_WIDTH + 1)


def test_a_rows_result_does_not_depend_on_the_rows_beside_it() -> None:
    """Bit for bit, alone or not; and a row that is no number spoils itself alone."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 640, generator=generator).to(DEVICE)
    weight = torch.randn(640, generator=generator).to(DEVICE)
    x[2] = torch.nan
    options: dict[str, Any] = {"post_weight": weight, "post_eps": 1e-6, "next_weight": weight, "next_eps": 1e-6}
    residual = x.clone()
    outs = [
        norm.rms_norm(x, weight, 1e-6),
        norm.add_norm(residual, x, **options),
        activation.gated_activation(x, "silu"),
        activation.capped_logits(x, 3.0),
    ]
    for row in (0, 1, 3):
        alone = x[row : row + 1].clone()
        alone_outs = [
            norm.rms_norm(alone, weight, 1e-6),
            norm.add_norm(alone.clone(), alone, **options),
            activation.gated_activation(alone, "silu"),
            activation.capped_logits(alone, 3.0),
        ]
        for out, alone_out in zip(outs, alone_outs, strict=True):
            assert alone_out.isfinite().all()
            assert torch.equal(out[row], alone_out[0])
    assert all(out[2].isnan().all() for out in [*outs, residual])


def test_pages_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    """On the CPU in a sparse file, so that no memory is taken. Offsets of 32 bits would wrap."""
    dim, page_tokens, page = 16, 4, 5
    unit = 1 << 29  # elements, of 2 bytes
    assert page * unit > 1 << 31
    size = (page + 1) * unit
    if DEVICE.type == "cpu":
        arena = torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=torch.float16)
    else:
        arena = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    pages = [arena.as_strided((page + 1, page_tokens, 1, dim), (unit, dim, dim, 1), start) for start in (0, 4096)]
    generator = torch.Generator().manual_seed(2)
    columns = torch.randn(1, 3 * dim, generator=generator).to(DEVICE)
    angles = torch.randn(1, 1, dim // 2, generator=generator).to(DEVICE)
    weight = torch.randn(dim, generator=generator).to(DEVICE)
    heads.transform_heads(
        columns,
        HeadTransform(weight, weight, 0.3, angles.cos(), angles.sin()),
        num_heads=1,
        num_kv_heads=1,
        cache=LayerCache(*pages),
        slots=torch.tensor([page * page_tokens + 1], device=DEVICE),
    )
    key = rotated64(norm64(columns[:, dim : 2 * dim].unflatten(1, (1, dim)), weight, 0.3), angles.cos(), angles.sin())
    assert_near(pages[0][page, 1, 0], key[0, 0])
    assert_near(pages[1][page, 1, 0], columns[0, 2 * dim :].cpu().double())
    assert not pages[0][page, 0].any()


def test_pages_of_8_bit_floats() -> None:
    """Heads of ones with signs, whose norm is 1, by weights that these floats hold: nothing is to be rounded."""
    generator = torch.Generator().manual_seed(4)
    levels = torch.tensor([0.5, 0.8125, -1.75, 3.25, 11.0, 416.0, 0.015625, -0.001953125])
    signs = torch.randint(2, (3, 2 * 32), generator=generator) * 2.0 - 1
    values = levels[torch.randint(8, (3, 32), generator=generator)]
    weight = levels.repeat(4)
    pages = torch.zeros(2, 4, 1, 32, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    others = pages.clone()
    tables = [table.to(DEVICE) for table in (torch.ones(3, 1, 16), torch.zeros(3, 1, 16))]
    heads.transform_heads(
        torch.cat((signs, values), 1).to(DEVICE),
        HeadTransform(torch.ones(32, device=DEVICE), weight.to(DEVICE), 0.0, *tables),
        num_heads=1,
        num_kv_heads=1,
        cache=LayerCache(pages, others),
        slots=torch.tensor([6, -1, 1], device=DEVICE),
    )
    for written, expected in ((pages, signs[:, 32:] * weight), (others, values)):
        rows = written.cpu().float().view(8, 32)
        assert torch.equal(rows[[6, 1]], expected[[0, 2]])
        assert not rows[[0, 2, 3, 4, 5, 7]].any()


def heads_arguments(**overrides: Any) -> dict[str, Any]:
    arena = nan_arena(1 << 12).view(torch.float32)
    pages = arena.as_strided((4, 4, 2, 16), (128, 32, 16, 1))
    tables = torch.ones(3, 1, 8)
    arguments = {
        "columns": torch.zeros(3, 6 * 16),
        "transform": HeadTransform(torch.ones(16), torch.ones(16), 1e-6, tables, tables),
        "num_heads": 2,
        "num_kv_heads": 2,
        "cache": LayerCache(pages, pages),
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    return arguments | overrides


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"columns": torch.zeros(3, 95)}, r"columns has shape \[3, 95\].*\[rows, 96\]"),
        ({"columns": torch.zeros(96, 3).t()}, "elements of a row must be adjacent"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"\[2\] slots for 3 tokens"),
        ({"cache": LayerCache(*[torch.zeros(4, 2, 4, 16).transpose(1, 2)] * 2)}, "token-major pages of 2 heads of 16"),
        (
            {"transform": HeadTransform(torch.ones(8), torch.ones(16), 1e-6, *[torch.ones(3, 1, 8)] * 2)},
            r"query_norm is torch.float32 \[8\].*float32 \[16\]",
        ),
        (
            {"transform": HeadTransform(None, torch.ones(16).half(), 1e-6, *[torch.ones(3, 1, 8)] * 2)},
            r"key_norm is torch.float16 \[16\].*float32 \[16\], or None",
        ),
        (
            {"transform": HeadTransform(None, None, 1e-6, *[torch.ones(3, 1, 9)] * 2)},
            r"cos has shape \[3, 1, 9\].*at most 8",
        ),
        (
            {"transform": HeadTransform(None, None, 1e-6, torch.ones(3, 1, 8), torch.ones(3, 1, 4))},
            r"sin has shape \[3, 1, 4\].*the same n for both",
        ),
        ({"transform": HeadTransform(None, None, 1e-6, torch.ones(3, 1, 8), None)}, "sin is None and the other is not"),
        ({"bias": torch.zeros(95)}, r"bias is torch.float32 \[95\].*\[96\], or None"),
        ({"bias": torch.zeros(96, dtype=torch.int64)}, r"bias is torch.int64 \[96\].*contiguous floats"),
        (
            {"transform": HeadTransform(torch.ones(16), torch.ones(16), 1e-6, *[torch.ones(2, 1, 8)] * 2)},
            r"cos has shape \[2, 1, 8\]",
        ),
        (
            {
                "transform": HeadTransform(
                    torch.ones(16), torch.ones(16), 1e-6, torch.ones(3, 1, 8), torch.ones(3, 1, 16)[..., :8]
                )
            },
            "rows of different strides",
        ),
    ],
)
def test_heads_that_the_kernel_would_misread_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        heads.transform_heads(**heads_arguments(**overrides))


def test_rows_that_the_kernels_would_misread_are_refused() -> None:
    x, weight = torch.zeros(3, 8), torch.ones(8)
    rest: dict[str, Any] = {"post_weight": weight, "post_eps": 0.1, "next_weight": weight, "next_eps": 0.1}
    with pytest.raises(InvariantError, match="must be adjacent"):
        norm.rms_norm(torch.zeros(8, 3).t(), weight, 0.1)
    with pytest.raises(InvariantError, match=r"weight is torch.float16 \[8\].*float32 \[8\]"):
        norm.rms_norm(x, weight.half(), 0.1)
    with pytest.raises(InvariantError, match="y has 2 rows and x has 3"):
        norm.add_norm(x, x[:2], **rest)
    with pytest.raises(InvariantError, match=r"next_weight is .*\[4\]"):
        norm.add_norm(x, x, **rest | {"next_weight": weight[:4]})
    with pytest.raises(InvariantError, match=r"bias is torch.float32 \[4\].*\[8\], or None"):
        norm.add_norm(x, x, **rest, bias=weight[:4])
    with pytest.raises(InvariantError, match=r"bias is torch.float32 \[4\].*\[8\], or None"):
        activation.gated_activation(x, "silu", weight[:4])
    with pytest.raises(InvariantError, match="gate_up has 7 columns"):
        activation.gated_activation(x[:, :7], "silu")
    with pytest.raises(InvariantError, match="activation='tanh' is not known; choose one of gelu_tanh, silu"):
        activation.gated_activation(x, "tanh")
    with pytest.raises(InvariantError, match="logits has shape"):
        activation.capped_logits(x[0], 1.0)
