"""Linear layers with int8 weights and integer activations: exact integer sums, faster than float multiply-adds.

Weights are those of `lamella.native.int8`. Activations are quantised as they come, with a scale for each row and group
of 128 inputs. They are given 16 bits, more than the name asks for: the instructions that multiply without saturating
take 16-bit factors, so 8 would be no faster, and would cost as much precision again as the weights' 8 do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from lamella.native.arguments import require_library
from lamella.native.int8 import Int8Weight, check_activations, quantize_int8
from lamella.native.library import Int, Pointer

GROUP_INPUTS = 128  # csrc/int8_dot.h
ACTIVATION_LEVELS = 32767


def quantize_w8a8(weight: Tensor) -> Int8Weight:
    """The same weights as `quantize_int8`: one copy serves both kinds of product."""
    return quantize_int8(weight)


def linear_w8a8(x: Tensor, weight: Int8Weight) -> Tensor:
    """x @ weight^T with x rounded to 16 bits: float32 [..., num_out] of contiguous float32 [..., num_in].

    A group of 128 inputs of a row has the scale of its largest magnitude / 32767 and levels to nearest, ties to even. A
    group below 1e-30 counts as zero; a row with NaN or infinity gives NaN. A group's integer sum is exact and rounded
    once, so a row's result does not depend on the other rows or on the threads. Raises ConfigError for other types or
    shapes.
    """
    num_in, num_out = weight.num_in, weight.num_out
    check_activations(x, num_in)
    out = x.new_empty(*x.shape[:-1], num_out)
    _function()(
        x.data_ptr(), weight.panels.data_ptr(), weight.scales.data_ptr(), out.data_ptr(), x.numel() // num_in,
        num_out, num_in,
    )  # fmt: skip
    return out


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function("w8a8_linear", *[Pointer] * 4, *[Int] * 3)
