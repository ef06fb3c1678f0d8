"""The operations on a GPU: matrix products by torch, everything between them in fused Triton kernels.

A layer is four products, attention, and four kernels of ours (docs/gpu.md); layers with LayerNorms, gates, or norms of
whole projections take a few more. The residual stream changes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import linear

from lamella.attention.native_backend import HeadTransform
from lamella.errors import InvariantError
from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate
from lamella.model_executor.layers.contract import LayerInputs
from lamella.model_executor.layers.description import DecoderLayer, Experts, Model, Norm, Projection
from lamella.model_executor.layers.head_transform import head_transform
from lamella.model_executor.layers.textbook import biases_of_heads, project, project_heads, run_layers
from lamella.model_executor.layers.torch_adapters import torch_adapter
from lamella.model_executor.layers.triton.activation import (
    activated,
    capped_logits,
    gate_attention,
    gated_activation,
)
from lamella.model_executor.layers.triton.clamped import clamped_activation
from lamella.model_executor.layers.triton.experts import run_experts
from lamella.model_executor.layers.triton.heads import transform_heads
from lamella.model_executor.layers.triton.norm import add_norm, layer_norm, rms_norm
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.models.config import GateConfig, MLPConfig
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.weights.forms import RowMajor


class TritonOperators:
    """Goes with the triton backend, whose pages its kernels write. No call waits for the device, and what is launched
    follows from shapes alone, so that steps can be captured as CUDA graphs."""

    name = "triton"
    weight_form = RowMajor()

    def __init__(self, workers: WorkerSum = ONE_WORKER) -> None:
        self.workers = workers

    def prepare(self, model: Model) -> None:
        """Does nothing: weights are used as they are stored."""

    def unsupported(self, layer: DecoderLayer) -> str | None:
        return None

    def adapter(self, updates: Mapping[str, LowRankUpdate], device: torch.device) -> Adapter:
        return torch_adapter(updates, device)

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x if scale == 1.0 else x.mul_(torch.tensor(scale, dtype=x.dtype))

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        inputs: Sequence[LayerInputs],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_layers(self, step, layers, following, inputs, x, normed)

    def attention(
        self,
        step: StepAttention,
        layer: DecoderLayer,
        inputs: LayerInputs,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """K and V go from their projection into the pages in one kernel, together with the queries where these are of
        the same tokens."""
        config = layer.attention.config
        place, slots = _place(step, layer), step.taken(layer.index).slot_mapping
        transform = head_transform(layer, inputs.rotary)
        q_bias, kv_bias = biases_of_heads(layer)
        if rows is None:
            projection = layer.attention.qkv_proj
            columns = project(self, projection, normed, inputs.adapters)
            num_kv_heads = 0 if config.kv_owner is not None else config.num_kv_heads
            bias = self._norm_rows(layer, columns, projection.bias, num_queries=config.num_heads)
            queries = _heads(columns, bias, transform, config.num_heads, num_kv_heads, place, slots)
        else:
            columns, keys_values = project_heads(self, layer, normed, rows, inputs.adapters)
            if keys_values is not None:
                kv_bias = self._norm_rows(layer, keys_values, kv_bias, num_queries=0)
                _heads(keys_values, kv_bias, transform, 0, config.num_kv_heads, place, slots)
            q_bias = self._norm_rows(layer, columns, q_bias, num_queries=config.num_heads)
            queries = _heads(columns, q_bias, transform.of_rows(rows), config.num_heads, 0, place, slots)
        scale = inputs.of_rows(rows).query_scale
        if scale is not None:
            queries = (queries * scale).to(queries.dtype)
        return step.attend_written(layer.index, queries).flatten(1)

    def _norm_rows(
        self, layer: DecoderLayer, columns: torch.Tensor, bias: torch.Tensor | None, *, num_queries: int
    ) -> torch.Tensor | None:
        """Of `columns`, Q with num_queries heads, then K and V if they are there: the norms that the kernel of heads
        does not know, in place. They come after the bias, so that is added too; returns what is left of it to add."""
        attention, config = layer.attention, layer.attention.config
        if config.qk_norm != "projection" and attention.v_norm is None:
            return bias
        if bias is not None:
            columns += bias
        num_query, num_key = num_queries * config.k_dim, config.key_columns
        if config.qk_norm == "projection" and attention.q_norm is not None and num_query:
            columns[:, :num_query] = self.norm(columns[:, :num_query], attention.q_norm)
        if columns.shape[1] == num_query:
            return None
        keys, values = columns[:, num_query : num_query + num_key], columns[:, num_query + num_key :]
        if config.qk_norm == "projection" and attention.k_norm is not None:
            keys[:] = self.norm(keys, attention.k_norm)
        if attention.v_norm is not None:
            values[:] = self.norm(values.reshape(-1, config.v_dim), attention.v_norm).view_as(values)
        return None

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        return linear(x, projection.weight[columns])

    def gate(
        self, attended: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, config: GateConfig
    ) -> torch.Tensor:
        return gate_attention(attended, gate, config.activation, bias)

    def experts(self, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        return run_experts(self, experts, x, routed)

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, config: MLPConfig) -> torch.Tensor:
        if config.clamp is not None:
            return clamped_activation(gate_up, config.activation, config.clamp, bias)
        if config.is_gated:
            return gated_activation(gate_up, config.activation, bias)
        return activated(gate_up, config.activation, bias=bias)

    def multiply_activated(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        return activated(gate, activation, factor=factor)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.is_layer_norm:
            return layer_norm(x, norm.weight, norm.bias, norm.eps)
        return rms_norm(x, norm.weight, norm.eps)

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        post_norm: Norm | None,
        next_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if any(norm is not None and norm.is_layer_norm for norm in (post_norm, next_norm)):
            if post_norm is not None:
                y, bias = self.norm(y if bias is None else y + bias, post_norm), None
            add_norm(x, y, post_weight=None, post_eps=0.0, next_weight=None, next_eps=0.0, bias=bias)
            return x, x if next_norm is None else self.norm(x, next_norm)
        normed = add_norm(
            x,
            y,
            post_weight=None if post_norm is None else post_norm.weight,
            post_eps=0.0 if post_norm is None else post_norm.eps,
            next_weight=None if next_norm is None else next_norm.weight,
            next_eps=0.0 if next_norm is None else next_norm.eps,
            bias=bias,
        )
        return x, normed

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = linear(hidden, weight.weight)
        logits = logits if bias is None else logits.float() + bias
        return logits.float() if softcap is None else capped_logits(logits, softcap)


def _place(step: StepAttention, layer: DecoderLayer) -> LayerPlace:
    """Where the layer's pages are. These kernels write K and V themselves, so the backend must be the one whose page
    layout they know."""
    if step.backend.name != "triton":
        raise InvariantError(
            f"triton operators were asked to write the pages of backend {step.backend.name!r} themselves; those that "
            "do go with 'triton'"
        )
    return step.place(layer.index, has_kv=layer.attention.config.kv_owner is None)


def _heads(
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    transform: HeadTransform,
    num_heads: int,
    num_kv_heads: int,
    place: LayerPlace,
    slots: torch.Tensor,
) -> torch.Tensor:
    return transform_heads(
        columns,
        transform,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        cache=place.cache,
        slots=slots,
        k_scale=place.params.k_scale,
        v_scale=place.params.v_scale,
        bias=bias,
    )
