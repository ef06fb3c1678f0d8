"""What fused kernels do with the heads of a QKV projection, from a layer's description."""

from __future__ import annotations

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.layers.contract import Rotary
from lamella.model_executor.layers.description import DecoderLayer


def head_transform(layer: DecoderLayer, rotary: Rotary | None) -> HeadTransform:
    """The layer's norms of heads and the rotary embedding of the step's tokens; what is not there is left out, and so
    is a norm of all heads as one row, which these kernels do not know."""
    attention = layer.attention
    is_by_head = attention.config.qk_norm != "projection"
    q_norm, k_norm = (attention.q_norm, attention.k_norm) if is_by_head else (None, None)
    return HeadTransform(
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        *(rotary or (None, None)),
    )
