"""What follows attention in a transformer layer as one call.

Addresses are taken once, since for a single row Python's passing of arguments would take as long as the work.
Structures mirror those of csrc/layers.cpp.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lamella.errors import ConfigError, InvariantError
from lamella.native.arguments import check_contiguous, check_rows, check_vector, require_library
from lamella.native.experts import Experts
from lamella.native.layer_linear import LinearLayer, LinearStructure
from lamella.native.library import Float, Int, Pointer
from lamella.native.low_rank import StepAdapters
from lamella.native.mlp import GatedMLP, MLPStructure


class TailStructure(ctypes.Structure):
    _fields_ = (
        ("out_proj", LinearStructure),
        ("mlp", MLPStructure),
        ("experts", Pointer),
        ("post_attention_norm", Pointer),
        ("pre_mlp_norm", Pointer),
        ("post_mlp_norm", Pointer),
        ("following_norm", Pointer),
        ("eps", Float),
    )


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function("finish_layer", Pointer, Pointer, Pointer, Int, Pointer, Pointer, Int)


class LayerTail:
    """From a layer's attention to the next layer's input: output projection, MLP or experts, and norms around both."""

    def __init__(
        self,
        out_proj: LinearLayer,
        mlp: GatedMLP | Experts,
        *,
        post_attention_norm: Tensor | None,
        pre_mlp_norm: Tensor | None,
        post_mlp_norm: Tensor | None,
        following_norm: Tensor | None,
        eps: float,
    ) -> None:
        """Norms: float32 [out_proj.num_out], the factors themselves; where one is None, its input goes on as it is.

        Raises ConfigError for layers that do not follow each other.
        """
        width = out_proj.num_out
        if mlp.width != width:
            raise ConfigError(
                f"layers {out_proj.num_in} -> {width} and {mlp.width} -> {mlp.width} do not follow each other; the "
                f"output projection gives what the MLP takes"
            )
        norms = (post_attention_norm, pre_mlp_norm, post_mlp_norm, following_norm)
        for norm in norms:
            if norm is not None:
                check_vector("norm", norm, width)
        self.num_in = out_proj.num_in
        self.width = width
        self._kept = (out_proj, mlp, norms)  # their memory is what the addresses are of
        self.structure = TailStructure(
            out_proj.structure,
            mlp.structure if isinstance(mlp, GatedMLP) else MLPStructure(),
            mlp.address if isinstance(mlp, Experts) else None,
            *(None if norm is None else norm.data_ptr() for norm in norms),
            eps,
        )
        self._address = ctypes.addressof(self.structure)
        self._call = _function()

    def __call__(self, x: Tensor, attended: Tensor, adapters: StepAdapters | None = None, layer: int = 0) -> Tensor:
        """Take attention's output and then the MLP's into the residual stream `x` [T, width], which changes in place.

        attended: [T, out_proj.num_in]. Both contiguous float32. Returns following_norm(x), or a copy of x without that
        norm, [T, width]; all as `elementwise.add_norm` and `elementwise.gated_activation` have it. adapters: of the
        rows; layer: which of the layers that these have this is.
        """
        check_rows("x", x, self.width)
        check_rows("attended", attended, self.num_in)
        check_contiguous("x", x)
        check_contiguous("attended", attended)
        num_rows = x.shape[0]
        if attended.shape[0] != num_rows:
            raise ConfigError(f"attended has {attended.shape[0]} rows; x has {num_rows}")
        if adapters is not None and (adapters.num_rows != num_rows or layer >= adapters.num_layers):
            raise InvariantError(
                f"adapters of {adapters.num_rows} rows and {adapters.num_layers} layers came with {num_rows} rows and "
                f"layer {layer}"
            )
        normed = torch.empty(num_rows, self.width)
        address = None if adapters is None else adapters.address
        if num_rows:
            self._call(self._address, x.data_ptr(), attended.data_ptr(), num_rows, normed.data_ptr(), address, layer)
        return normed
