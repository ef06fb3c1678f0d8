"""Gated activations with bounds, in float32, rounded once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lamella.errors import InvariantError
from lamella.model_executor.layers.triton.activation import ACTIVATIONS, BLOCK_ELEMENTS, activation_of
from lamella.model_executor.layers.triton.rows import check_bias, check_rows, launch_options
from lamella.model_executor.models.mlp_config import GateClamp


@triton.jit
def clamped_kernel(
    gate_up,
    bias,
    out,
    row_stride,
    limit,
    slope,
    up_offset,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of its WIDTH results). A row, and `bias` unless it is None, is gate [WIDTH], then up [WIDTH];
    out is contiguous. See GateClamp."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=present, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
        up += tl.load(bias + WIDTH + column, mask=present, other=0.0).to(tl.float32)
    if not LIMITS_ACTIVATED:
        gate = tl.where(gate > limit, limit, gate)
    activated = activation_of(gate, slope, ACTIVATION)
    if LIMITS_ACTIVATED:
        activated = tl.where(activated > limit, limit, activated)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + up_offset
    tl.store(out + row * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=present)


def clamped_activation(
    gate_up: torch.Tensor, activation: str, clamp: GateClamp, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `activation.gated_activation`, with the bounds of `clamp`."""
    if activation not in ACTIVATIONS:
        raise InvariantError(f"activation={activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
    check_rows("gate_up", gate_up)
    num_rows, columns = gate_up.shape
    if columns % 2:
        raise InvariantError(f"gate_up has {columns} columns; half are the gate, so their number must be even")
    check_bias("bias", bias, columns)
    out = gate_up.new_empty(num_rows, columns // 2)
    if num_rows:
        grid = (num_rows, triton.cdiv(columns // 2, BLOCK_ELEMENTS))
        constants = clamped_constants(columns // 2, activation, clamp)
        clamped_kernel[grid](
            gate_up, bias, out, gate_up.stride(0), clamp.limit, clamp.slope, clamp.up_offset, **constants
        )
    return out


def clamped_constants(width: int, activation: str, clamp: GateClamp) -> dict[str, Any]:
    """Compile-time constants and launch options of `clamped_kernel`."""
    return {
        "WIDTH": width,
        "ACTIVATION": activation,
        "LIMITS_ACTIVATED": clamp.after_activation,
        "BLOCK": BLOCK_ELEMENTS,
        **launch_options(BLOCK_ELEMENTS),
    }
