"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it.

Layers that all tokens leave run as one call, attention and all. A layer that only some tokens leave is two: attention,
and what follows it. So is one whose attention the call does not know (`unsupported`). What follows attention runs by
the textbook, operation by operation, where it is not the gated MLP with RMS norms that there is one call for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from lamella.attention.native_backend import NativeBackend, paged_layer
from lamella.errors import InvariantError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate
from lamella.model_executor.layers.contract import HeadScores, LayerInputs
from lamella.model_executor.layers.description import DecoderLayer, DenseMLP, Experts, Model, Norm, Projection
from lamella.model_executor.layers.head_transform import head_transform
from lamella.model_executor.layers.linear_kinds import LinearKind
from lamella.model_executor.layers.native_adapters import NativeAdapter, native_adapters
from lamella.model_executor.layers.native_mlp import gate_of, native_experts, native_mlp
from lamella.model_executor.layers.textbook import finish_layer
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.models.config import GateConfig, MLPConfig, RotaryConfig
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.weights.forms import WeightForm
from lamella.native import decoder
from lamella.native.decoder import DecoderWeights, LayerStep
from lamella.native.elementwise import activated, add_norm, gate_attention, gated_activation, layer_norm
from lamella.native.experts import Experts as NativeExperts
from lamella.native.layer_linear import LinearLayer
from lamella.native.layers import LayerTail
from lamella.native.low_rank import StepAdapters
from lamella.native.mlp import clamped_activation


class NativeOperators:
    name = "native"

    def __init__(self, kind: LinearKind, workers: WorkerSum = ONE_WORKER) -> None:
        """workers: with several, the biases of sums are the first one's (`Worker.adds_biases_in_products`)."""
        self.workers = workers
        self._kind = kind
        # (name of the projection, first output, last output + 1) -> the layer of these outputs.
        self._linears: dict[tuple[str, int, int], LinearLayer] = {}
        self._tails: dict[int, LayerTail] = {}  # layer -> what follows its attention
        self._experts: dict[str, NativeExperts] = {}  # by name, of layers that run by the textbook
        self._weights: dict[int, DecoderWeights] = {}  # of the layers that run as one call
        self._places: list[LayerPlace] = []  # the places that `_paged` was made for
        self._paged: dict[int, decoder.PagedLayer] = {}  # the layers that run as one call, with their pages
        self._layers: Sequence[DecoderLayer] = ()

    @property
    def weight_form(self) -> WeightForm:
        return self._kind.weight_form

    def prepare(self, model: Model) -> None:
        self._layers = model.layers
        following = [*(layer.input_norm for layer in model.layers[1:]), model.norm]
        for layer, next_norm in zip(model.layers, following, strict=True):
            attention = layer.attention
            qkv_proj, num_query = attention.qkv_proj, attention.config.query_columns
            self._add(qkv_proj, 0, num_query)
            if num_query < qkv_proj.num_out:
                self._add(qkv_proj, num_query, qkv_proj.num_out)
            if self._reason_against_one_tail(layer, next_norm) is None:
                self._tails[layer.index] = LayerTail(
                    self._add(attention.o_proj, 0, attention.o_proj.num_out),
                    native_mlp(layer.mlp, self._add),
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
                    model.norm.eps if attention.q_norm is None else attention.q_norm.eps,
                    self._tails[layer.index],
                )

    def _add(self, projection: Projection, start: int, stop: int) -> LinearLayer:
        """Make the outputs [start, stop) of the projection a layer of their own."""
        layer = self._linears[projection.name, start, stop] = self._kind.layer(projection, start, stop)
        return layer

    def unsupported(self, layer: DecoderLayer) -> str | None:
        config = layer.attention.config
        if config.kv_owner is not None:
            return "it reads another layer's K and V"
        if config.qk_norm == "projection":
            return "Q and K are normed as whole rows"
        if config.has_value_norm:
            return "V is normed"
        if config.query_scale is not None:
            return "queries are scaled by their positions"
        return self._reason_against_one_tail(layer, None)

    def _reason_against_one_tail(self, layer: DecoderLayer, next_norm: Norm | None) -> str | None:
        if self.workers.num_workers > 1:
            return "its outputs are summed over workers"
        return _reason_against_one_tail(layer, next_norm)

    def adapter(self, updates: Mapping[str, LowRankUpdate], device: torch.device) -> Adapter:
        return NativeAdapter(updates, self._layers)

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._kind.gather(table, token_ids, scale)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.is_layer_norm:
            return layer_norm(x, norm.weight, norm.bias, norm.eps)
        return add_norm(x, None, None, norm.weight, norm.eps)

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """As `Operators.multiply`; the bias is in the result, and the operations below add none."""
        key = (projection.name, columns.start, columns.stop)
        linear = self._linears.get(key) or self._add(projection, columns.start, columns.stop)
        return linear(x.contiguous())

    def gate(
        self, attended: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, config: GateConfig
    ) -> torch.Tensor:
        gate_attention(attended, gate, config.activation)
        return attended

    def experts(self, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        name = experts.gate_up_proj.name
        if name not in self._experts:
            self._experts[name] = native_experts(experts, self._add)
        return self._experts[name](x.contiguous(), routed)

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, config: MLPConfig) -> torch.Tensor:
        if config.clamp is not None:
            return clamped_activation(gate_up, gate_of(config))
        if config.is_gated:
            return gated_activation(gate_up, config.activation)
        return activated(gate_up, None, config.activation)

    def multiply_activated(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        return activated(gate, factor, activation)

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        post_norm: Norm | None,
        next_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not any(norm is not None and norm.is_layer_norm for norm in (post_norm, next_norm)):
            eps = next((norm.eps for norm in (post_norm, next_norm) if norm is not None), 0.0)
            return x, add_norm(x, y, _weight(post_norm), _weight(next_norm), eps)
        add_norm(x, y if post_norm is None else self.norm(y, post_norm), None, None, 0.0)
        return x, x if next_norm is None else self.norm(x, next_norm)

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        inputs: Sequence[LayerInputs],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = step.output_rows(layers[-1].index)
        adapters = inputs[0].adapters  # all layers but the last have the same tokens, and so the same adapters
        step_adapters = None if adapters is None else native_adapters(adapters)
        num_whole = len(layers) - (rows is not None)
        first = 0
        while first < len(layers):
            stop = first
            while stop < num_whole and layers[stop].index in self._weights:
                stop += 1
            if stop > first:
                self._run_fused(step, layers[first:stop], inputs[first:stop], x, normed, step_adapters)
                first = stop
                continue
            layer, its_rows = layers[first], rows if first == num_whole else None
            attended = self.attention(step, layer, inputs[first], normed, its_rows)
            if its_rows is not None:
                x = x[its_rows]
            if layer.index in self._tails:
                if its_rows is not None and adapters is not None:
                    step_adapters = native_adapters(adapters.of_rows(its_rows))
                normed = self._tails[layer.index](x, attended, step_adapters, layer.index)
            else:
                normed = normed if its_rows is None else normed[its_rows]
                next_norm = layers[first + 1].input_norm if first + 1 < len(layers) else following
                of_rows = inputs[first].of_rows(its_rows)
                x, normed = finish_layer(self, layer, next_norm, of_rows, x, normed, attended)
                normed = normed.clone() if normed is x else normed  # the next layer may change both
            first += 1
        return x, normed

    def _run_fused(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        inputs: Sequence[LayerInputs],
        x: torch.Tensor,
        normed: torch.Tensor,
        adapters: StepAdapters | None,
    ) -> None:
        """Run the layers as one call of the library; x and normed change in place."""
        backend = _native(step)
        if step.places is not self._places:
            self._bind(step.places)
        # Layers with the same key share one.
        steps: dict[tuple[int, KVCacheSpec, int, RotaryConfig | None], LayerStep] = {}
        of_layers = []
        for layer, its_inputs in zip(layers, inputs, strict=True):
            place, config = step.place(layer.index, has_kv=True), layer.attention.config
            key = (place.group, place.params.spec, config.num_heads, config.rotary)
            if key not in steps:
                steps[key] = backend.layer_step(place.params, its_inputs.rotary, step.taken(layer.index))
            of_layers.append(steps[key])
        decoder.run_layers(
            [self._paged[layer.index] for layer in layers],
            of_layers,
            x,
            normed,
            adapters,
            layers[0].index,
            None if step.clock is None else step.clock.native_attention,
        )

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
        inputs: LayerInputs,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write K and V of all tokens and attend with the queries of `rows` (None: of all) -> [S, num_heads *
        v_dim]."""
        attention, config = layer.attention, layer.attention.config
        projection, num_query = attention.qkv_proj, config.query_columns
        has_kv = config.kv_owner is None
        backend, place = _native(step), step.place(layer.index, has_kv=has_kv)
        transform = head_transform(layer, inputs.rotary)
        adapters = inputs.adapters
        taken = normed if rows is None else normed[rows]
        queries = self._linears[projection.name, 0, num_query](taken)
        if adapters is not None:
            adapters.of_rows(rows).add_to(queries, projection.name, taken, slice(0, num_query))
        if config.qk_norm == "projection" and attention.q_norm is not None:
            queries = self.norm(queries, attention.q_norm)
        if has_kv:
            keys_values = self._linears[projection.name, num_query, projection.num_out](normed)
            if adapters is not None:
                adapters.add_to(keys_values, projection.name, normed, slice(num_query, projection.num_out))
            self._norm_keys_values(layer, keys_values)
            start = time.monotonic()
            backend.write_keys_values(place.params, place.cache, keys_values, transform, step.taken(layer.index))
            if step.clock is not None:
                step.clock.add_attention(start)
        if rows is not None:
            transform = transform.of_rows(rows)
        left, scale = step.left(layer.index), inputs.of_rows(rows).query_scale
        start = time.monotonic()
        attended = backend.attend_queries(place.params, place.cache, queries, transform, left, scale)
        if step.clock is not None:
            step.clock.add_attention(start)
        return attended.flatten(1)

    def _norm_keys_values(self, layer: DecoderLayer, keys_values: torch.Tensor) -> None:
        """The norms of K and V [T, columns] that the kernel which writes them does not know, in place."""
        attention, num_key = layer.attention, layer.attention.config.key_columns
        if attention.config.qk_norm == "projection" and attention.k_norm is not None:
            keys_values[:, :num_key] = self.norm(keys_values[:, :num_key], attention.k_norm)
        if attention.v_norm is not None:
            values = keys_values[:, num_key:]
            values[:] = self.norm(values.reshape(-1, attention.v_norm.width), attention.v_norm).view_as(values)

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None = None
    ) -> HeadScores:
        return self._kind.head(weight, hidden, softcap, bias)


def _reason_against_one_tail(layer: DecoderLayer, next_norm: Norm | None) -> str | None:
    """Why what follows attention is not one call; None: it is."""
    if layer.attention.gate_proj is not None:
        return "attention has a gate"
    if layer.is_parallel:
        return "the MLP runs beside attention"
    if isinstance(layer.mlp, DenseMLP) and not layer.mlp.config.is_gated:
        return "its MLP is not a gated one"
    if layer.experts_beside is not None:
        return "it has experts beside its MLP"
    if layer.per_layer_gate is not None or layer.scalar is not None:
        return "it takes in inputs of its own, or is scaled"
    norms = (layer.post_attention_norm, layer.mlp_norm, layer.post_mlp_norm, next_norm)
    return "its norms are LayerNorms" if any(norm is not None and norm.is_layer_norm for norm in norms) else None


def _weight(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _native(step: StepAttention) -> NativeBackend:
    if not isinstance(step.backend, NativeBackend):
        raise InvariantError(
            f"native operators were given a step of backend {step.backend.name!r}; they go with 'native'"
        )
    return step.backend
