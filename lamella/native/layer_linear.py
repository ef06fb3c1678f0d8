"""Linear layers of every kind behind one call.

Addresses are taken once, since for a single row Python's passing of arguments would take as long as the work.
Structures mirror those of csrc/layer_linear.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lamella.errors import ConfigError
from lamella.native.arguments import check_contiguous, check_rows, check_vector, require_library
from lamella.native.gguf_linear import FORMATS, GgufWeight
from lamella.native.int8 import Int8Weight
from lamella.native.library import Int, Pointer
from lamella.native.linear import PackedWeight

# csrc/layer_linear.h; weights of a GGUF type have the type's own number
_INT8, _W8A8, _FLOAT32 = -1, -2, 0

Weight = PackedWeight | Int8Weight | GgufWeight


class _Part(ctypes.Structure):
    _fields_ = (("kind", Int), ("panels", Pointer), ("scales", Pointer), ("num_columns", Int))


class LinearStructure(ctypes.Structure):
    _fields_ = (("parts", Pointer), ("num_parts", Int), ("num_columns", Int), ("depth", Int), ("bias", Pointer))


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function("layer_linear", Pointer, Pointer, Int, Pointer)


class LinearLayer:
    """y = x W^T + bias, the outputs of `weights` side by side. All weights have the same inputs. There can be several
    only of the float32 and GGUF kinds.

    bias: float32, one number for each of these outputs, added to the product; None: none. int8_activations: w8a8, with
    int8 weights.
    """

    def __init__(
        self, weights: Sequence[Weight], *, int8_activations: bool = False, bias: Tensor | None = None
    ) -> None:
        """Raises ConfigError for weights that do not go together, InvariantError for a bias that does not fit."""
        self.num_in = weights[0].num_in
        self.num_out = sum(weight.num_out for weight in weights)
        if any(weight.num_in != self.num_in for weight in weights):
            raise ConfigError(
                f"weights of {[weight.num_in for weight in weights]} inputs make no layer; one number does"
            )
        if len(weights) > 1 and any(isinstance(weight, Int8Weight) for weight in weights):
            raise ConfigError(f"{len(weights)} weights with int8 among them make no layer; fuse int8 weights into one")
        if bias is not None:
            check_vector("bias", bias, self.num_out)
        self._kept = (tuple(weights), bias)  # their memory is what the addresses are of
        self._parts = (_Part * len(weights))(*(_part(weight, int8_activations) for weight in weights))
        self.structure = LinearStructure(
            ctypes.addressof(self._parts),
            len(weights),
            self.num_out,
            self.num_in,
            None if bias is None else bias.data_ptr(),
        )
        self._address = ctypes.addressof(self.structure)
        self._call = _function()

    def __call__(self, x: Tensor) -> Tensor:
        """`x` contiguous float32 [T, num_in] -> [T, num_out]. A row's result does not depend on the others."""
        check_rows("x", x, self.num_in)
        check_contiguous("x", x)
        num_rows = x.shape[0]
        out = torch.empty(num_rows, self.num_out)
        if num_rows:
            self._call(self._address, x.data_ptr(), num_rows, out.data_ptr())
        return out


def _part(weight: Weight, int8_activations: bool) -> _Part:
    if isinstance(weight, Int8Weight):
        kind = _W8A8 if int8_activations else _INT8
        return _Part(kind, weight.panels.data_ptr(), weight.scales.data_ptr(), weight.num_out)
    if int8_activations:
        raise ConfigError(f"int8_activations go with int8 weights; {type(weight).__name__} has none")
    if isinstance(weight, PackedWeight):
        return _Part(_FLOAT32, weight.data.data_ptr(), None, weight.num_out)
    return _Part(FORMATS[weight.type_name].number, weight.panels.data_ptr(), None, weight.num_out)
