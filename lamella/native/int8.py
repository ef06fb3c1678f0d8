"""Linear layers whose weights are int8 and whose activations stay float.

Each output has one scale: its largest weight / 127. Finer groups along the inputs are not needed: on Gemma 3 270M one
scale per output gives a KL divergence of 0.002 from float weights, and the sum over the inputs stays a single chain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lamella.errors import ConfigError
from lamella.native.arguments import check_device, check_panels, check_vector, require_library
from lamella.native.library import PANEL, Float, Int, Pointer

LINE_STEPS = 4  # inputs whose bytes lie side by side: csrc/int8_panels.h
LEVELS = 127  # symmetric: -128 is not used, so that every value has its negative
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller scales would be subnormal and lose digits
ROWS_AT_ONCE = 8192  # outputs quantised at once: bounds the float temporaries


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """weight[n, k] ~ scales[n] * q[n, k], |q| <= 127; |error| <= scales[n] * (1/2 + 2^-16).

    An output whose weights are all below 127 * 2^-126 is stored as zeros with scale 0.
    """

    panels: Tensor  # int8 [ceil(num_out / 16), ceil(num_in / 4), 16, 4], zeros where it pads
    scales: Tensor  # float32 [ceil(num_out / 16) * 16]
    num_out: int
    num_in: int

    def __post_init__(self) -> None:
        num_panels = -(-self.num_out // PANEL)
        shape = (num_panels, -(-self.num_in // LINE_STEPS), PANEL, LINE_STEPS)
        check_panels("panels", self.panels, shape, torch.int8)
        check_vector("scales", self.scales, num_panels * PANEL)

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """float32 [num_out, num_in]."""
        return self.levels() * self.scales[: self.num_out, None]

    def levels(self) -> Tensor:
        """q: int8 [num_out, num_in]."""
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)  # [num_panels * 16, padded inputs]
        return rows[: self.num_out, : self.num_in]


def pack_panels(rows: Tensor) -> Tensor:
    """int8 [N, K] -> [ceil(N / 16), ceil(K / 4), 16, 4], zeros where N or K is no multiple."""
    num_out, num_in = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -num_in % LINE_STEPS, 0, -num_out % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // LINE_STEPS, LINE_STEPS).transpose(1, 2).contiguous()


def check_weight(weight: Tensor) -> None:
    """Raises ConfigError unless `weight` is a floating [N, K] with at least one element."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ConfigError(
            f"weight is {weight.dtype} {list(weight.shape)}; int8 quantisation takes a floating [outputs, inputs]"
        )


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> int8 [N, K], to nearest with ties to even, and scales [N]. ConfigError where not finite."""
    largest = weight.abs().amax(dim=1)
    if not bool(largest.isfinite().all()):
        row = int((~largest.isfinite()).nonzero()[0, 0])
        raise ConfigError(f"weight has {float(largest[row])} in row {row}; int8 quantisation takes finite weights")
    scales = largest / LEVELS
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    divisor = torch.where(scales == 0, torch.inf, scales)
    return (weight / divisor[:, None]).round().to(torch.int8), scales


def quantize_int8(weight: Tensor) -> Int8Weight:
    """`weight` floating [N, K], to int8 with one scale for each of the N outputs.

    Raises ConfigError unless it is a matrix of finite numbers.
    """
    check_weight(weight)
    num_out, num_in = weight.shape
    num_panels = -(-num_out // PANEL)
    panels = torch.empty(num_panels, -(-num_in // LINE_STEPS), PANEL, LINE_STEPS, dtype=torch.int8)
    scales = torch.zeros(num_panels * PANEL)
    for begin in range(0, num_out, ROWS_AT_ONCE):
        rows, row_scales = round_to_int8(weight[begin : begin + ROWS_AT_ONCE].float())
        part = pack_panels(rows)
        panels[begin // PANEL : begin // PANEL + part.shape[0]] = part
        scales[begin : begin + rows.shape[0]] = row_scales
    return Int8Weight(panels, scales, num_out, num_in)


class _Functions(NamedTuple):
    linear: Callable[..., None]
    gather_rows: Callable[..., int]


@functools.cache
def _functions() -> _Functions:
    library = require_library()
    return _Functions(
        library.function("int8_linear", *[Pointer] * 5, *[Int] * 3),
        library.function("int8_gather_rows", Pointer, Pointer, Int, Int, Pointer, Int, Float, Pointer, restype=Int),
    )


def check_activations(x: Tensor, num_in: int) -> None:
    """Raises ConfigError unless `x` is float32, contiguous, [..., num_in], InvariantError unless on the CPU."""
    if x.dtype != torch.float32 or x.shape[-1:] != (num_in,) or not x.is_contiguous():
        contiguous = "contiguous" if x.is_contiguous() else "not contiguous"
        raise ConfigError(
            f"x is {x.dtype} {list(x.shape)}, {contiguous}; this weight takes contiguous float32 [..., {num_in}]"
        )
    check_device("x", x)


def contiguous_ids(ids: Tensor) -> Tensor:
    """Raises ConfigError unless `ids` are int64, InvariantError unless on the CPU."""
    if ids.dtype != torch.int64:
        raise ConfigError(f"ids are {ids.dtype}; rows are gathered by int64 ids")
    check_device("ids", ids)
    return ids.contiguous()


def check_gathered(wrong: int, ids: Tensor, num_out: int) -> None:
    """wrong: what a gathering kernel returned. Raises IndexError if that is the index of an id that is out of range."""
    if wrong >= 0:
        raise IndexError(f"id {int(ids.flatten()[wrong])} was asked for; rows are 0 to {num_out - 1}")


def check_bias(bias: Tensor, num_out: int) -> None:
    if bias.dtype != torch.float32 or tuple(bias.shape) != (num_out,) or not bias.is_contiguous():
        raise ConfigError(f"bias is {bias.dtype} {list(bias.shape)}; this weight takes contiguous float32 [{num_out}]")
    check_device("bias", bias)


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """scales * (x @ q^T) + bias, float32 [..., num_out]; `x` contiguous float32 [..., num_in].

    Every sum is a chain of fused multiply-adds over the inputs in order, so a row's result does not depend on the
    other rows or on the threads. Raises ConfigError for other types or shapes.
    """
    num_in, num_out = weight.num_in, weight.num_out
    check_activations(x, num_in)
    if bias is not None:
        check_bias(bias, num_out)
    out = x.new_empty(*x.shape[:-1], num_out)
    _functions().linear(
        x.data_ptr(), weight.panels.data_ptr(), weight.scales.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), x.numel() // num_in, num_out, num_in,
    )  # fmt: skip
    return out


def gather_rows_int8(weight: Int8Weight, ids: Tensor, factor: float = 1.0) -> Tensor:
    """The weights of outputs `ids` (int64, any shape), dequantised, times `factor`: float32 [*ids.shape, num_in].

    Raises ConfigError for other types, IndexError for ids outside of [0, num_out).
    """
    ids = contiguous_ids(ids)
    out = torch.empty(*ids.shape, weight.num_in)
    wrong = _functions().gather_rows(
        weight.panels.data_ptr(), weight.scales.data_ptr(), weight.num_out, weight.num_in, ids.data_ptr(),
        ids.numel(), factor, out.data_ptr(),
    )  # fmt: skip
    check_gathered(wrong, ids, weight.num_out)
    return out
