"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it."""

from __future__ import annotations

import torch

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.operators.base import (
    HeadScores,
    HeadShape,
    LayerTail,
    Norm,
    Projection,
    Rotary,
    StepAttention,
)
from lamella.model_executor.operators.linear_kinds import LinearKind
from lamella.model_executor.weight_forms import WeightForm
from lamella.native import layers
from lamella.native.elementwise import add_norm


class NativeOperators:
    name = "native"

    def __init__(self, kind: LinearKind) -> None:
        self._kind = kind

    @property
    def weight_form(self) -> WeightForm:
        return self._kind.weight_form

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._kind.gather(table, token_ids, scale)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return add_norm(x, None, None, norm.weight, norm.eps)

    def finish_layer(
        self, tail: LayerTail, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        native = tail.derived.get("native")
        if native is None:
            native = tail.derived["native"] = self._layer_tail(tail)
        return x, native(x, attended)

    def _layer_tail(self, tail: LayerTail) -> layers.LayerTail:
        return layers.LayerTail(
            *(self._layer(weight, 0, weight.num_out) for weight in (tail.o_proj, tail.gate_up_proj, tail.down_proj)),
            post_attention_norm=tail.post_attention_norm.weight,
            pre_mlp_norm=tail.pre_mlp_norm.weight,
            post_mlp_norm=tail.post_mlp_norm.weight,
            following_norm=tail.following_norm.weight,
            eps=tail.following_norm.eps,
            activation=tail.activation,
        )

    def _layer(self, weight: Projection, start: int, stop: int) -> layers.LinearLayer:
        """Outputs [start, stop) of `weight`."""
        layer: layers.LinearLayer | None = weight.derived.get((start, stop))
        if layer is None:
            layer = weight.derived[start, stop] = self._kind.layer(weight, start, stop)
        return layer

    def attend(
        self,
        attention: StepAttention,
        layer: int,
        projection: Projection,
        x: torch.Tensor,
        heads: HeadShape,
        norms: tuple[Norm, Norm],
        rotary: Rotary,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        query_norm, key_norm = norms
        transform = HeadTransform(query_norm.weight, key_norm.weight, query_norm.eps, *rotary)
        if output_rows is None:
            return attention.fused(layer, self._layer(projection, 0, projection.num_out)(x), transform).flatten(1)
        # K and V of all, Q of the rows that are wanted.
        num_query = heads.sizes[0]
        queries = self._layer(projection, 0, num_query)(x[output_rows])
        keys_values = self._layer(projection, num_query, projection.num_out)(x)
        return attention.fused_outputs(layer, queries, keys_values, transform, output_rows).flatten(1)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> HeadScores:
        return self._kind.head(weight, hidden, softcap)
