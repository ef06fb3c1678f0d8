"""Norms of whole rows; RMS norms also with the addition to the residual stream that comes before.

One program takes one row and keeps it in registers, so a row's result does not depend on the rows beside it.
Arithmetic is in float32; what is stored is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lamella.errors import ConfigError, InvariantError
from lamella.model_executor.layers.triton.rows import check_bias, check_rows, launch_options

MAX_WIDTH = 16384  # of a row that one program's registers hold


@triton.jit
def normed_row(row, weight, eps, column, present, WIDTH: tl.constexpr):
    """row / sqrt(mean(row^2) + eps) * weight, float32; `row` is 0 where it is not present."""
    factor = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    return row * factor * tl.load(weight + column, mask=present, other=0.0)


@triton.jit
def norm_kernel(x, weight, out, x_row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row). out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    present = column < WIDTH
    values = tl.load(x + row * x_row_stride + column, mask=present, other=0.0).to(tl.float32)
    normed = normed_row(values, weight, eps, column, present, WIDTH)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=present)


@triton.jit
def add_norm_kernel(
    x,
    y,
    bias,
    post_weight,
    next_weight,
    out,
    x_row_stride,
    y_row_stride,
    post_eps,
    next_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): x += norm(y + bias) in place, and out, which is contiguous, the norm of that.

    bias, post_weight and next_weight may each be None: without post_weight y is added as it is, without next_weight
    there is no out.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    present = column < WIDTH
    residual = x + row * x_row_stride + column
    values = tl.load(y + row * y_row_stride + column, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
    added = values
    if post_weight is not None:
        added = normed_row(values, post_weight, post_eps, column, present, WIDTH)
    total = tl.load(residual, mask=present, other=0.0).to(tl.float32) + added
    # Norm x as it is stored, after rounding, for that is what any later reader finds.
    kept = total.to(x.dtype.element_ty)
    tl.store(residual, kept, mask=present)
    if next_weight is not None:
        normed = normed_row(kept.to(tl.float32), next_weight, next_eps, column, present, WIDTH)
        tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=present)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, x_row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): the row without its mean, over its deviation. bias may be None. out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    present = column < WIDTH
    values = tl.load(x + row * x_row_stride + column, mask=present, other=0.0).to(tl.float32)
    centred = tl.where(present, values - tl.sum(values, 0) / WIDTH, 0.0)
    normed = normed_row(centred, weight, eps, column, present, WIDTH)
    if bias is not None:
        normed += tl.load(bias + column, mask=present, other=0.0)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=present)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: x [T, width], rows adjacent or apart; weight float32 [width]; a new
    contiguous tensor of x's dtype. Raises ConfigError above MAX_WIDTH, InvariantError for other shapes."""
    check_rows("x", x)
    num_rows, width = x.shape
    _check_weight("weight", weight, width)
    out = x.new_empty(num_rows, width)
    if num_rows:
        norm_kernel[(num_rows,)](x, weight, out, x.stride(0), eps, **norm_constants(width))
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias: as `rms_norm`; bias float32 [width], or None."""
    check_rows("x", x)
    num_rows, width = x.shape
    _check_weight("weight", weight, width)
    check_bias("bias", bias, width)
    out = x.new_empty(num_rows, width)
    if num_rows:
        layer_norm_kernel[(num_rows,)](x, weight, bias, out, x.stride(0), eps, **norm_constants(width))
    return out


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    post_weight: torch.Tensor | None,
    post_eps: float,
    next_weight: torch.Tensor | None,
    next_eps: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x += rms_norm(y + bias) * post_weight, in place; returns rms_norm(x) * next_weight of the new x.

    Without post_weight x += y + bias; without next_weight x itself is returned. bias: of the projection that made y,
    [width] of any float dtype. x, y [T, width] of one dtype, rows adjacent or apart; weights float32 [width]. The
    result is contiguous and of x's dtype. Raises as `rms_norm`.
    """
    check_rows("x", x)
    num_rows, width = x.shape
    check_rows("y", y, width)
    if y.shape[0] != num_rows:
        raise InvariantError(f"y has {y.shape[0]} rows and x has {num_rows}; each row of y goes to one of x")
    for name, weight in (("post_weight", post_weight), ("next_weight", next_weight)):
        if weight is not None:
            _check_weight(name, weight, width)
    check_bias("bias", bias, width)
    out = None if next_weight is None else x.new_empty(num_rows, width)
    if num_rows:
        add_norm_kernel[(num_rows,)](
            x,
            y,
            bias,
            post_weight,
            next_weight,
            out,
            x.stride(0),
            y.stride(0),
            post_eps,
            next_eps,
            **norm_constants(width),
        )
    return x if out is None else out


def norm_constants(width: int) -> dict[str, Any]:
    """Compile-time constants and launch options of each kernel. Raises ConfigError above MAX_WIDTH."""
    if width > MAX_WIDTH:
        raise ConfigError(
            f"rows of {width} elements are too wide for the triton norms, which take up to {MAX_WIDTH}; "
            "attention_backend='torch' takes any"
        )
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, **launch_options(block)}


def _check_weight(name: str, weight: torch.Tensor, width: int) -> None:
    if tuple(weight.shape) != (width,) or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise InvariantError(
            f"{name} is {weight.dtype} {list(weight.shape)}; the norms take contiguous float32 [{width}]"
        )
