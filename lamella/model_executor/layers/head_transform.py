"""What fused kernels do with the heads of a QKV projection, from a layer's description."""

from __future__ import annotations

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.layers.contract import Rotary
from lamella.model_executor.layers.description import DecoderLayer


def head_transform(layer: DecoderLayer, rotary: Rotary | None) -> HeadTransform:
    """The layer's norms of heads and the rotary embedding of the step's tokens; what is not there is left out."""
    q_norm, k_norm = layer.attention.q_norm, layer.attention.k_norm
    return HeadTransform(
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        *(rotary or (None, None)),
    )
