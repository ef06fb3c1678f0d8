"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it.

Layers that all tokens leave run as one call, attention and all. A layer that only some tokens leave is two: attention,
and what follows it. So is one that the call does not know (`unsupported`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.attention.native_backend import NativeBackend, paged_layer
from lamella.errors import InvariantError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers.contract import HeadScores, Rotary
from lamella.model_executor.layers.description import DecoderLayer, Model, Norm, Projection
from lamella.model_executor.layers.head_transform import head_transform
from lamella.model_executor.layers.linear_kinds import LinearKind
from lamella.model_executor.models.config import RotaryConfig
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.weights.forms import WeightForm
from lamella.native import decoder
from lamella.native.decoder import DecoderWeights, LayerStep
from lamella.native.elementwise import add_norm
from lamella.native.layer_linear import LinearLayer
from lamella.native.layers import LayerTail
from lamella.native.mlp import Gate, GatedMLP


class NativeOperators:
    name = "native"

    def __init__(self, kind: LinearKind) -> None:
        self._kind = kind
        # (name of the projection, first output, last output + 1) -> the layer of these outputs.
        self._linears: dict[tuple[str, int, int], LinearLayer] = {}
        self._tails: dict[int, LayerTail] = {}  # layer -> what follows its attention
        self._weights: dict[int, DecoderWeights] = {}  # of the layers that run as one call
        self._places: list[LayerPlace] = []  # the places that `_paged` was made for
        self._paged: dict[int, decoder.PagedLayer] = {}  # the layers that run as one call, with their pages

    @property
    def weight_form(self) -> WeightForm:
        return self._kind.weight_form

    def prepare(self, model: Model) -> None:
        following = [*(layer.input_norm for layer in model.layers[1:]), model.norm]
        for layer, next_norm in zip(model.layers, following, strict=True):
            attention, mlp = layer.attention, layer.mlp
            qkv_proj, num_query = attention.qkv_proj, attention.config.query_columns
            self._add(qkv_proj, 0, num_query)
            if num_query < qkv_proj.num_out:
                self._add(qkv_proj, num_query, qkv_proj.num_out)
            self._tails[layer.index] = LayerTail(
                self._add(attention.o_proj, 0, attention.o_proj.num_out),
                GatedMLP(
                    *(self._add(each, 0, each.num_out) for each in (mlp.gate_up_proj, mlp.down_proj)),
                    Gate(mlp.config.activation),
                ),
                post_attention_norm=_weight(layer.post_attention_norm),
                pre_mlp_norm=_weight(layer.mlp_norm),
                post_mlp_norm=_weight(layer.post_mlp_norm),
                following_norm=_weight(next_norm),
                eps=model.norm.eps,
            )
            if self.unsupported(layer) is None:
                self._weights[layer.index] = DecoderWeights(
                    self._add(qkv_proj, 0, qkv_proj.num_out),
                    _weight(attention.q_norm),
                    _weight(attention.k_norm),
                    model.norm.eps,
                    self._tails[layer.index],
                )

    def _add(self, projection: Projection, start: int, stop: int) -> LinearLayer:
        """Make the outputs [start, stop) of the projection a layer of their own."""
        layer = self._linears[projection.name, start, stop] = self._kind.layer(projection, start, stop)
        return layer

    def unsupported(self, layer: DecoderLayer) -> str | None:
        if layer.attention.config.kv_owner is not None:
            return "it reads another layer's K and V"
        return None

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._kind.gather(table, token_ids, scale)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return add_norm(x, None, None, norm.weight, norm.eps)

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        rotaries: Sequence[Rotary | None],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = step.output_rows(layers[-1].index)
        num_whole = len(layers) - (rows is not None)
        first = 0
        while first < len(layers):
            stop = first
            while stop < num_whole and layers[stop].index in self._weights:
                stop += 1
            if stop > first:
                self._run_fused(step, layers[first:stop], rotaries[first:stop], x, normed)
                first = stop
                continue
            layer, its_rows = layers[first], rows if first == num_whole else None
            attended = self.attention(step, layer, rotaries[first], normed, its_rows)
            if its_rows is not None:
                x = x[its_rows]
            normed = self._tails[layer.index](x, attended)
            first += 1
        return x, normed

    def _run_fused(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[Rotary | None],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """Run the layers as one call of the library; x and normed change in place."""
        backend = _native(step)
        if step.places is not self._places:
            self._bind(step.places)
        # Layers with the same key share one.
        steps: dict[tuple[int, KVCacheSpec, int, RotaryConfig | None], LayerStep] = {}
        of_layers = []
        for layer, rotary in zip(layers, rotaries, strict=True):
            place, config = step.place(layer.index, has_kv=True), layer.attention.config
            key = (place.group, place.params.spec, config.num_heads, config.rotary)
            if key not in steps:
                steps[key] = backend.layer_step(place.params, rotary, step.taken(layer.index))
            of_layers.append(steps[key])
        decoder.run_layers([self._paged[layer.index] for layer in layers], of_layers, x, normed)

    def _bind(self, places: list[LayerPlace]) -> None:
        """Join the layers with the pages that they have in this arena."""
        self._paged = {
            index: paged_layer(places[index].params, places[index].cache, weights)
            for index, weights in self._weights.items()
        }
        self._places = places

    def attention(
        self,
        step: StepAttention,
        layer: DecoderLayer,
        rotary: Rotary | None,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write K and V of all tokens and attend with the queries of `rows` (None: of all) -> [S, num_heads *
        v_dim]."""
        config = layer.attention.config
        projection, num_query = layer.attention.qkv_proj, config.query_columns
        has_kv = config.kv_owner is None
        backend, place = _native(step), step.place(layer.index, has_kv=has_kv)
        transform = head_transform(layer, rotary)
        queries = self._linears[projection.name, 0, num_query](normed if rows is None else normed[rows])
        if has_kv:
            keys_values = self._linears[projection.name, num_query, projection.num_out](normed)
            backend.write_keys_values(place.params, place.cache, keys_values, transform, step.taken(layer.index))
        if rows is not None:
            transform = transform.of_rows(rows)
        left = step.left(layer.index)
        return backend.attend_queries(place.params, place.cache, queries, transform, left).flatten(1)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> HeadScores:
        return self._kind.head(weight, hidden, softcap)


def _weight(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _native(step: StepAttention) -> NativeBackend:
    if not isinstance(step.backend, NativeBackend):
        raise InvariantError(
            f"native operators were given a step of backend {step.backend.name!r}; they go with 'native'"
        )
    return step.backend
