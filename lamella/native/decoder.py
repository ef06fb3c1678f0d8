"""Transformer layers, attention and all, as one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lamella.errors import ConfigError, InvariantError
from lamella.native.arguments import (
    check_contiguous,
    check_indices,
    check_rows,
    check_vector,
    require_library,
    rotary_or_empty,
)
from lamella.native.attention import MAX_INT, Batch, Pages
from lamella.native.layer_linear import LinearLayer, LinearStructure
from lamella.native.layers import LayerTail, TailStructure
from lamella.native.library import PANEL, Float, Int, Pointer
from lamella.native.low_rank import StepAdapters


# These structures mirror those of csrc/layers.cpp.
class _DecoderLayer(ctypes.Structure):
    _fields_ = (
        ("qkv_proj", LinearStructure),
        ("query_norm", Pointer),
        ("key_norm", Pointer),
        ("eps", Float),
        ("num_heads", Int),
        ("pages", Pointer),
        ("window_tokens", Int),
        ("chunk_tokens", Int),
        ("scale", Float),
        ("softcap", Float),
        ("sinks", Pointer),
        ("tail", TailStructure),
    )


class _LayerStep(ctypes.Structure):
    _fields_ = (("batch", Pointer), ("slots", Pointer), ("cos", Pointer), ("sin", Pointer), ("rotary_dim", Int))


class Visibility(NamedTuple):
    """Which keys a layer's queries see, and how scores are computed. A window, chunk or cap of 0 means that there is
    none."""

    window_tokens: int
    chunk_tokens: int
    scale: float
    softcap: float
    sinks: Tensor | None


class DecoderWeights(NamedTuple):
    """qkv_proj: query heads, then keys of the KV heads, then their values. Norms: of a head, float32 [k_dim], or None.

    How many heads there are and of what sizes may differ from layer to layer; only the width is the stack's.
    """

    qkv_proj: LinearLayer
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    tail: LayerTail


class PagedLayer:
    """A layer's weights and its pages: all of it that is the same in every step."""

    def __init__(self, weights: DecoderWeights, pages: Pages, num_heads: int, visibility: Visibility) -> None:
        """Raises ConfigError for projections that do not fit the pages."""
        k_dim, v_dim = pages.k_dim, pages.v_dim
        if pages.num_kv_heads < 1 or num_heads % pages.num_kv_heads:
            raise ConfigError(f"{num_heads} query heads cannot share {pages.num_kv_heads} KV heads; a multiple can")
        columns, attended = num_heads * k_dim + pages.num_kv_heads * (k_dim + v_dim), num_heads * v_dim
        qkv_proj, tail = weights.qkv_proj, weights.tail
        if (qkv_proj.num_in, qkv_proj.num_out, tail.num_in) != (tail.width, columns, attended):
            raise ConfigError(
                f"projections {qkv_proj.num_in} -> {qkv_proj.num_out} and {tail.num_in} -> {tail.width} do not fit "
                f"{num_heads} query heads and {pages.num_kv_heads} KV heads of {k_dim} (K) and {v_dim} (V): "
                f"{tail.width} -> {columns} and {attended} -> {tail.width} would"
            )
        for norm in (weights.query_norm, weights.key_norm):
            if norm is not None:
                check_vector("norm", norm, k_dim)
                if k_dim % PANEL:
                    raise ConfigError(f"heads of {k_dim} cannot be normed; multiples of {PANEL} can")
        sinks = visibility.sinks
        if sinks is not None:
            check_vector("sinks", sinks, num_heads)
        self.width = tail.width
        self.k_dim = k_dim
        self.num_ids, self.num_slots = pages.num_ids, pages.num_slots
        self._kept = (weights, pages, visibility)  # their memory is what the addresses are of
        self._structure = _DecoderLayer(
            qkv_proj.structure,
            None if weights.query_norm is None else weights.query_norm.data_ptr(),
            None if weights.key_norm is None else weights.key_norm.data_ptr(),
            weights.eps,
            num_heads,
            ctypes.addressof(pages),
            visibility.window_tokens,
            visibility.chunk_tokens,
            visibility.scale,
            visibility.softcap,
            None if sinks is None else sinks.data_ptr(),
            tail.structure,
        )
        self.address = ctypes.addressof(self._structure)


class LayerStep:
    """What a layer needs of a step: the batch, where K and V go, and rotary embedding. Layers may share it."""

    def __init__(self, batch: Batch, slots: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
        """slots: int64 [T], -1: nowhere. cos and sin: float32 [T, rotary_dim / 2]; dimensions of 1 do not matter. They
        turn the first rotary_dim dimensions of a head, half against half; None: no rotary embedding.

        Raises InvariantError for shapes that do not fit.
        """
        num_rows = slots.numel()
        cos, sin = rotary_or_empty(cos, sin, num_rows)
        half = cos.shape[-1]
        check_indices("slots", slots, num_rows, first=-1, stop=MAX_INT)
        if batch.num_rows != num_rows:
            raise InvariantError(f"slots are of {num_rows} tokens; the batch has {batch.num_rows}")
        for name, table in (("cos", cos), ("sin", sin)):
            if table.numel() != num_rows * half:
                raise InvariantError(
                    f"{name} has shape {list(table.shape)}; {num_rows} tokens take [{num_rows}, {half}]"
                )
            check_rows(name, table.reshape(num_rows, half), half)
            check_contiguous(name, table)
        self.num_rows = num_rows
        # `run_layers` compares it with the pages of each layer.
        self.stop_slot = int(slots.numpy().max(initial=-1)) + 1
        self.stop_id = int(batch.stop_id)
        self.rotary_dim = 2 * half
        self._kept = (batch, slots, cos, sin)  # their memory is what the addresses are of
        self._structure = _LayerStep(
            ctypes.addressof(batch), slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), self.rotary_dim
        )
        self.address = ctypes.addressof(self._structure)


@functools.cache
def _function() -> Callable[..., int]:
    return require_library().function(
        "run_layers", Pointer, Pointer, Int, Pointer, Pointer, Int, Pointer, Int, Pointer, restype=Int
    )


def run_layers(
    layers: Sequence[PagedLayer],
    steps: Sequence[LayerStep],
    x: Tensor,
    normed: Tensor,
    adapters: StepAdapters | None = None,
    first_layer: int = 0,
    attention_seconds: ctypes.c_double | None = None,
) -> None:
    """All rows through one layer after the other, each with its step.

    x [T, width] is the residual stream, normed [T, width] its norm: the first layer's input, and in the end what
    follows the last. Both contiguous float32; they change in place. adapters: of the rows; first_layer: which of the
    layers that these have is the first here. attention_seconds: what the time of rotary embedding, writing K and V and
    attention is added to; None: nobody wants to know. Raises MemoryError where there is none for attention's tiles.
    """
    num_layers, num_rows = len(layers), x.shape[0]
    for layer, step in zip(layers, steps, strict=True):
        if step.num_rows != num_rows or step.rotary_dim > layer.k_dim:
            raise InvariantError(
                f"a step of {step.num_rows} tokens and {step.rotary_dim} rotated dimensions came with {num_rows} rows "
                f"and heads of {layer.k_dim}"
            )
        if step.stop_slot > layer.num_slots or step.stop_id > layer.num_ids:
            raise InvariantError(
                f"a step has slots up to {step.stop_slot - 1} and pages up to {step.stop_id - 1}; a layer's pages end "
                f"with slot {layer.num_slots - 1} of page {layer.num_ids - 1}"
            )
        check_rows("x", x, layer.width)
    check_rows("normed", normed, x.shape[1])
    check_contiguous("x", x)
    check_contiguous("normed", normed)
    if normed.shape != x.shape:
        raise InvariantError(f"normed has {normed.shape[0]} rows; x has {num_rows}")
    if not num_rows or not num_layers:
        return
    if adapters is not None and (adapters.num_rows != num_rows or first_layer + num_layers > adapters.num_layers):
        raise InvariantError(
            f"adapters of {adapters.num_rows} rows and {adapters.num_layers} layers came with {num_rows} rows and "
            f"layers up to {first_layer + num_layers - 1}"
        )
    addresses = Pointer * num_layers
    if _function()(
        addresses(*(layer.address for layer in layers)),
        addresses(*(step.address for step in steps)),
        num_layers, x.data_ptr(), normed.data_ptr(), num_rows, None if adapters is None else adapters.address,
        first_layer, None if attention_seconds is None else ctypes.addressof(attention_seconds),
    ):  # fmt: skip
        raise MemoryError(f"attention found no memory for {num_rows} rows")
