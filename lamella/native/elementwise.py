"""Norms and activations in float32 on the CPU, each one pass where torch takes several.

A row's result does not depend on the rows that come with it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamella.errors import InvariantError
from lamella.native.arguments import check_contiguous, check_device, check_rows, check_vector, require_library
from lamella.native.library import Float, Int, Pointer

ACTIVATIONS = ("gelu_tanh", "silu", "gelu", "quick_gelu", "relu", "relu_squared")  # by their numbers in kernels.h
GATES = ("sigmoid", "softplus")


class _Kernels(NamedTuple):
    add_norm: Any
    gated: Any
    activated: Any
    layer_norm: Any
    gate_attention: Any
    softcap: Any


@functools.cache
def _kernels() -> _Kernels:
    function = require_library().function
    return _Kernels(
        add_norm=function(
            "add_norm", Pointer, Int, Pointer, Int, Pointer, Pointer, Float, Int, Int, Pointer
        ),
        gated=function("gated", Int, Pointer, Int, Int, Int, Pointer),
        activated=function("activated", Int, Pointer, Int, Pointer, Int, Int, Int, Pointer),
        layer_norm=function("layer_norm", Pointer, Int, Pointer, Pointer, Float, Int, Int, Pointer),
        gate_attention=function("gate_attention", Pointer, Pointer, Int, Int, Int, Int, Int),
        softcap=function("softcap", Pointer, Int, Float),
    )  # fmt: skip


def add_norm(x: Tensor, y: Tensor | None, post_weight: Tensor | None, next_weight: Tensor | None, eps: float) -> Tensor:
    """Take a sublayer's output into the residual stream and norm that for the next: `x` [T, D] changes in place.

    x += rms_norm(y) * post_weight, or += y without `post_weight`, or stays without `y`.
    Returns rms_norm(x) * next_weight [T, D], or `x` itself without `next_weight`. Weights are what is multiplied with
    (Gemma's are stored as weight - 1).
    """
    if x.dim() != 2:
        raise InvariantError(f"x has shape {list(x.shape)}; it must be [tokens, width]")
    num_rows, width = x.shape
    check_rows("x", x, width, is_written=True)
    if next_weight is not None:
        check_vector("next_weight", next_weight, width)
    if y is not None:
        check_rows("y", y, width)
        if y.shape[0] != num_rows:
            raise InvariantError(f"y has {y.shape[0]} rows; x has {num_rows}")
    if post_weight is not None:
        if y is None:
            raise InvariantError("post_weight is given without y; it is y that it norms")
        check_vector("post_weight", post_weight, width)
    out = None if next_weight is None else torch.empty(num_rows, width)
    _kernels().add_norm(
        x.data_ptr(), x.stride(0), None if y is None else y.data_ptr(), 0 if y is None else y.stride(0),
        None if post_weight is None else post_weight.data_ptr(),
        None if next_weight is None else next_weight.data_ptr(), eps, num_rows, width,
        None if out is None else out.data_ptr(),
    )  # fmt: skip
    return x if out is None else out


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up for `gate_up` [T, 2 F], each row gate [F] then up [F] -> [T, F]. `kind`: ACTIVATIONS."""
    number = _number(kind)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise InvariantError(f"gate_up has shape {list(gate_up.shape)}; it must be [tokens, an even width]")
    num_rows, width = gate_up.shape
    check_rows("gate_up", gate_up, width)
    out = torch.empty(num_rows, width // 2)
    _kernels().gated(number, gate_up.data_ptr(), gate_up.stride(0), num_rows, width // 2, out.data_ptr())
    return out


def _number(kind: str) -> int:
    if kind not in ACTIVATIONS:
        raise InvariantError(f"kind={kind!r} is not an activation; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(kind)


def activated(gate: Tensor, factor: Tensor | None, kind: str) -> Tensor:
    """activation(gate) * factor, or without `factor` activation(gate): each [T, width]. `kind`: ACTIVATIONS."""
    number = _number(kind)
    if gate.dim() != 2:
        raise InvariantError(f"gate has shape {list(gate.shape)}; it must be [tokens, width]")
    num_rows, width = gate.shape
    check_rows("gate", gate, width)
    if factor is not None:
        check_rows("factor", factor, width)
        if factor.shape[0] != num_rows:
            raise InvariantError(f"factor has {factor.shape[0]} rows; gate has {num_rows}")
    out = torch.empty(num_rows, width)
    _kernels().activated(
        number, gate.data_ptr(), gate.stride(0), None if factor is None else factor.data_ptr(),
        0 if factor is None else factor.stride(0), num_rows, width, out.data_ptr(),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, of each row of x [T, D]; a new tensor."""
    if x.dim() != 2:
        raise InvariantError(f"x has shape {list(x.shape)}; it must be [tokens, width]")
    num_rows, width = x.shape
    check_rows("x", x, width)
    check_vector("weight", weight, width)
    if bias is not None:
        check_vector("bias", bias, width)
    out = torch.empty(num_rows, width)
    _kernels().layer_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), eps, num_rows, width,
        out.data_ptr(),
    )  # fmt: skip
    return out


def gate_attention(attended: Tensor, gate: Tensor, kind: str) -> None:
    """attended *= sigmoid(gate) or softplus(gate), in place: contiguous attended [T, num_gates * dim], each gate of
    [T, num_gates] for dim elements. `kind`: GATES."""
    if kind not in GATES:
        raise InvariantError(f"kind={kind!r} is not a gate; choose one of {', '.join(GATES)}")
    if attended.dim() != 2 or gate.dim() != 2:
        raise InvariantError(f"attended {list(attended.shape)} and gate {list(gate.shape)} must be [tokens, width]")
    num_rows, width = attended.shape
    num_gates = gate.shape[1]
    check_rows("attended", attended, width, is_written=True)
    check_contiguous("attended", attended)
    check_rows("gate", gate, num_gates)
    if gate.shape[0] != num_rows or not num_gates or width % num_gates:
        raise InvariantError(
            f"gate has shape {list(gate.shape)} for attended {list(attended.shape)}; it must have as many rows, and "
            "columns that divide it"
        )
    _kernels().gate_attention(
        attended.data_ptr(), gate.data_ptr(), gate.stride(0), num_rows, num_gates, width // num_gates,
        int(kind == "softplus"),
    )  # fmt: skip


def softcap(x: Tensor, cap: float) -> Tensor:
    """x = cap * tanh(x / cap) in place, for contiguous float32 `x` of any shape; returns `x`."""
    if x.dtype is not torch.float32:
        raise InvariantError(f"x has dtype {x.dtype}; the native kernels take torch.float32")
    check_contiguous("x", x)
    check_device("x", x)
    if not cap > 0:
        raise InvariantError(f"cap={cap} is not a bound; it must be above 0")
    _kernels().softcap(x.data_ptr(), x.numel(), cap)
    return x
