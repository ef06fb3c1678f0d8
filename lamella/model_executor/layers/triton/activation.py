"""Activations, element by element: those of the MLP, attention's gate, and the soft-cap of logits. In float32, rounded
once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lamella.errors import InvariantError
from lamella.model_executor.layers.triton.rows import check_bias, check_rows, launch_options

BLOCK_ELEMENTS = 1024
ACTIVATIONS = ("gelu_tanh", "silu", "gelu", "quick_gelu", "relu", "relu_squared")
GATES = ("sigmoid", "softplus")

_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def activation_of(x, slope, ACTIVATION: tl.constexpr):
    """slope: of silu, x / (1 + e^(-slope x))."""
    if ACTIVATION == "relu":
        activated = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        activated = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == "gelu":
        activated = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh z) = 1 / (1 + e^-2z), which neither overflows nor cancels: the rest are x times a logistic.
        if ACTIVATION == "gelu_tanh":
            exponent = _TWICE_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        elif ACTIVATION == "quick_gelu":
            exponent = 1.702 * x
        else:
            exponent = slope * x
        activated = x / (1.0 + tl.exp(-exponent))
    return activated


@triton.jit
def gated_kernel(gate_up, bias, out, row_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of its WIDTH results). A row, and `bias` unless it is None, is gate [WIDTH], then up [WIDTH];
    out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=present, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
        up += tl.load(bias + WIDTH + column, mask=present, other=0.0).to(tl.float32)
    activated = activation_of(gate, 1.0, ACTIVATION)
    tl.store(out + row * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=present)


@triton.jit
def activated_kernel(
    x,
    bias,
    factor,
    out,
    row_stride,
    factor_row_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of it): activation(x + bias) * factor. bias and factor may each be None; out is
    contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    value = tl.load(x + row * row_stride + column, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=present, other=0.0).to(tl.float32)
    activated = activation_of(value, 1.0, ACTIVATION)
    if factor is not None:
        activated *= tl.load(factor + row * factor_row_stride + column, mask=present, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, activated.to(out.dtype.element_ty), mask=present)


@triton.jit
def attention_gate_kernel(
    attended,
    gate,
    bias,
    gate_row_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of it): attended, which is contiguous, times what the gate of each DIM elements lets through.
    bias may be None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    value = tl.load(gate + row * gate_row_stride + column // DIM, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column // DIM, mask=present, other=0.0).to(tl.float32)
    if IS_SOFTPLUS:
        opened = tl.maximum(value, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(value)))
    else:
        opened = 1.0 / (1.0 + tl.exp(-value))
    place = attended + row * WIDTH + column
    kept = tl.load(place, mask=present, other=0.0).to(tl.float32) * opened
    tl.store(place, kept.to(attended.dtype.element_ty), mask=present)


@triton.jit
def softcap_kernel(logits, out, row_stride, softcap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of it): softcap * tanh(logits / softcap). out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < WIDTH
    scores = tl.load(logits + row * row_stride + column, mask=present, other=0.0).to(tl.float32)
    # tanh x = 1 - 2 / (1 + e^2x): no overflow on either side.
    capped = softcap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / softcap))))
    tl.store(out + row * WIDTH + column, capped, mask=present)


def gated_activation(gate_up: torch.Tensor, activation: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """gate_up [T, 2 * width], gate first -> activation(gate) * up, contiguous [T, width] of its dtype. Rows may lie
    apart. bias: of the projection that made gate_up, [2 * width] of any float dtype, added first. Raises InvariantError
    for an activation that is not in ACTIVATIONS, and for other shapes."""
    if activation not in ACTIVATIONS:
        raise InvariantError(f"activation={activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
    check_rows("gate_up", gate_up)
    num_rows, columns = gate_up.shape
    if columns % 2:
        raise InvariantError(f"gate_up has {columns} columns; half are the gate, so their number must be even")
    check_bias("bias", bias, columns)
    out = gate_up.new_empty(num_rows, columns // 2)
    if num_rows:
        constants = gated_constants(columns // 2, activation)
        grid = (num_rows, triton.cdiv(columns // 2, BLOCK_ELEMENTS))
        gated_kernel[grid](gate_up, bias, out, gate_up.stride(0), **constants)
    return out


def activated(
    x: torch.Tensor, activation: str, *, bias: torch.Tensor | None = None, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(x + bias) * factor, each [T, width]; a contiguous tensor of x's dtype. Without bias or factor that
    step is left out. Raises as `gated_activation`."""
    if activation not in ACTIVATIONS:
        raise InvariantError(f"activation={activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
    check_rows("x", x)
    num_rows, width = x.shape
    check_bias("bias", bias, width)
    if factor is not None:
        check_rows("factor", factor, width)
        if factor.shape[0] != num_rows:
            raise InvariantError(f"factor has {factor.shape[0]} rows and x has {num_rows}; each goes to one of x")
    out = x.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK_ELEMENTS))
        factor_stride = 0 if factor is None else factor.stride(0)
        constants = gated_constants(width, activation)
        activated_kernel[grid](x, bias, factor, out, x.stride(0), factor_stride, **constants)
    return out


def gate_attention(
    attended: torch.Tensor, gate: torch.Tensor, activation: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """attended *= activation(gate + bias) in place, and returned: attended contiguous [T, num_gates * dim], each gate
    of [T, num_gates] for dim elements. Raises InvariantError for an activation that is not in GATES, and for other
    shapes."""
    if activation not in GATES:
        raise InvariantError(f"activation={activation!r} is not a gate's; choose one of {', '.join(GATES)}")
    check_rows("attended", attended)
    check_rows("gate", gate)
    num_rows, width = attended.shape
    num_gates = gate.shape[1]
    if not attended.is_contiguous() or gate.shape[0] != num_rows or not num_gates or width % num_gates:
        raise InvariantError(
            f"gate has shape {list(gate.shape)} for attended {list(attended.shape)} with strides {attended.stride()}; "
            "the kernel takes contiguous rows, and a gate for each of equal parts of a row"
        )
    check_bias("bias", bias, num_gates)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK_ELEMENTS))
        constants = gate_constants(width, num_gates, activation)
        attention_gate_kernel[grid](attended, gate, bias, gate.stride(0), **constants)
    return attended


def capped_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap): logits [S, vocab] of any float dtype -> contiguous float32 [S, vocab]. Rows may
    lie apart. Raises InvariantError for other shapes."""
    check_rows("logits", logits)
    num_rows, width = logits.shape
    out = logits.new_empty(num_rows, width, dtype=torch.float32)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK_ELEMENTS))
        softcap_kernel[grid](logits, out, logits.stride(0), softcap, **softcap_constants(width))
    return out


def gated_constants(width: int, activation: str) -> dict[str, Any]:
    """Compile-time constants and launch options of `gated_kernel` and `activated_kernel`."""
    return {"ACTIVATION": activation, **softcap_constants(width)}


def gate_constants(width: int, num_gates: int, activation: str) -> dict[str, Any]:
    """Compile-time constants and launch options of `attention_gate_kernel`."""
    return {"DIM": width // num_gates, "IS_SOFTPLUS": activation == "softplus", **softcap_constants(width)}


def softcap_constants(width: int) -> dict[str, Any]:
    """Compile-time constants and launch options of `softcap_kernel`."""
    return {"WIDTH": width, "BLOCK": BLOCK_ELEMENTS, **launch_options(BLOCK_ELEMENTS)}
