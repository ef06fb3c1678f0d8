"""The kinds of linear layer that the native kernels have: what a weight is stored as, and how it is multiplied with.

| kind | weights | activations | of a row of the result |
|---|---|---|---|
| float32 | float32 | float32 | one chain of fused multiply-adds over the inputs |
| int8 | int8, a scale for each output | float32 | the same chain over the rounded weights |
| w8a8 | int8, a scale for each output | int16, a scale for 128 inputs | exact integer sums |
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from lamella.model_executor.layers.contract import HeadScores
from lamella.model_executor.layers.description import Projection
from lamella.model_executor.layers.native_heads import NativeScores, scores_by_parts
from lamella.model_executor.weights.forms import HEAD_ENDINGS, Int8Panels, Panels, WeightForm
from lamella.native.int8 import Int8Weight, gather_rows_int8
from lamella.native.int8_head import MAX_BEST, HeadTensors, Int8Head, assemble_head
from lamella.native.layer_linear import LinearLayer
from lamella.native.library import PANEL
from lamella.native.linear import PackedWeight, gather_rows, linear, linear_topk


class LinearKind(Protocol):
    """What the native kernels make of a stored weight."""

    @property
    def weight_form(self) -> WeightForm: ...

    def layer(self, weight: Projection, start: int, stop: int) -> LinearLayer:
        """Outputs [start, stop) of the weight. start is a multiple of a panel."""
        ...

    def gather(self, weight: Projection, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """weight[ids] * scale, ids int64 [T]."""
        ...

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None
    ) -> HeadScores: ...


class Float32Linear:
    """head_name: the parameter that is the language model's head."""

    def __init__(self, head_name: str) -> None:
        self.weight_form = Panels(head=head_name)
        self._int8_head: Int8Head | None = None

    def layer(self, weight: Projection, start: int, stop: int) -> LinearLayer:
        return LinearLayer([_packed(weight, start, stop)], bias=bias_of(weight, start, stop))

    def gather(self, weight: Projection, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return gather_rows(_packed(weight, 0, weight.num_out), ids, scale)

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None
    ) -> HeadScores:
        packed = _packed(weight, 0, weight.num_out)

        def top(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            if f"{weight.name}.weight" == self.weight_form.head and count <= MAX_BEST:
                if self._int8_head is None:
                    self._int8_head = _int8_head(weight)
                best = self._int8_head.best(x, count)
                return best.ids, best.values
            found = linear_topk(x, packed, count)
            return found.ids, found.values

        return NativeScores(hidden, weight.num_out, softcap, lambda x: linear(x, packed), top, bias)


class Int8Linear:
    """activations: "float32", or "int8" for w8a8."""

    weight_form = Int8Panels()

    def __init__(self, activations: str = "float32") -> None:
        self._int8_activations = activations == "int8"

    def layer(self, weight: Projection, start: int, stop: int) -> LinearLayer:
        return LinearLayer(
            [_int8(weight, start, stop)],
            bias=bias_of(weight, start, stop),
            int8_activations=self._int8_activations,
        )

    def gather(self, weight: Projection, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return gather_rows_int8(_int8(weight, 0, weight.num_out), ids, scale)

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None
    ) -> HeadScores:
        return scores_by_parts(partial(self.layer, weight), weight.num_out, hidden, softcap, bias)


def bias_of(weight: Projection, start: int, stop: int) -> torch.Tensor | None:
    return None if weight.bias is None else weight.bias[start:stop]


def _int8_head(weight: Projection) -> Int8Head:
    tensors = HeadTensors(*(weight.tensors[ending] for ending in HEAD_ENDINGS))
    return assemble_head(weight.weight, tensors, weight.num_out)


def _packed(weight: Projection, start: int, stop: int) -> PackedWeight:
    return PackedWeight(weight.weight[start // PANEL : -(-stop // PANEL)], stop - start, weight.num_in)


def _int8(weight: Projection, start: int, stop: int) -> Int8Weight:
    first, last = start // PANEL, -(-stop // PANEL)
    return Int8Weight(
        weight.weight[first:last], weight.tensors["scales"][first * PANEL : last * PANEL], stop - start, weight.num_in
    )
