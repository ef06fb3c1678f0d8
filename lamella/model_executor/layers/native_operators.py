"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.layers.contract import (
    DecoderLayer,
    HeadScores,
    Norm,
    Projection,
    Rotary,
    StepAttention,
)
from lamella.model_executor.layers.linear_kinds import LinearKind
from lamella.model_executor.weights.forms import WeightForm
from lamella.native.decoder import DecoderWeights
from lamella.native.elementwise import add_norm
from lamella.native.layers import LayerTail, LinearLayer


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

    def run_layers(
        self,
        attention: StepAttention,
        first: int,
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[Rotary],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention.run_layers(first, [self._weights(layer) for layer in layers], rotaries, x, normed)
        return x, normed

    def attend(
        self,
        attention: StepAttention,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rotary: Rotary,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        projection, num_query = layer.qkv_proj, layer.heads.sizes[0]
        transform = HeadTransform(layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.eps, *rotary)
        queries = self._linear(projection, 0, num_query)(x[output_rows])
        keys_values = self._linear(projection, num_query, projection.num_out)(x)
        return attention.fused_outputs(index, queries, keys_values, transform, output_rows).flatten(1)

    def finish_layer(
        self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self._weights(layer).tail(x, attended)

    def _weights(self, layer: DecoderLayer) -> DecoderWeights:
        weights: DecoderWeights | None = layer.derived.get("native")
        if weights is None:
            weights = layer.derived["native"] = DecoderWeights(
                self._linear(layer.qkv_proj, 0, layer.qkv_proj.num_out),
                layer.query_norm.weight,
                layer.key_norm.weight,
                layer.query_norm.eps,
                self._tail(layer),
            )
        return weights

    def _tail(self, layer: DecoderLayer) -> LayerTail:
        projections = (layer.o_proj, layer.gate_up_proj, layer.down_proj)
        return LayerTail(
            *(self._linear(weight, 0, weight.num_out) for weight in projections),
            post_attention_norm=layer.post_attention_norm.weight,
            pre_mlp_norm=layer.pre_mlp_norm.weight,
            post_mlp_norm=layer.post_mlp_norm.weight,
            following_norm=layer.following_norm.weight,
            eps=layer.following_norm.eps,
            activation=layer.activation,
        )

    def _linear(self, weight: Projection, start: int, stop: int) -> LinearLayer:
        """Outputs [start, stop) of `weight`."""
        layer: LinearLayer | None = weight.derived.get((start, stop))
        if layer is None:
            layer = weight.derived[start, stop] = self._kind.layer(weight, start, stop)
        return layer

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> HeadScores:
        return self._kind.head(weight, hidden, softcap)
