"""The operations in eager PyTorch, on any device: every layer that can be described, by the textbook's one path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate
from lamella.model_executor.layers.contract import LayerInputs, Rotary
from lamella.model_executor.layers.description import DecoderLayer, Experts, Model, Norm, Projection
from lamella.model_executor.layers.rotary import apply_rotary
from lamella.model_executor.layers.textbook import biases_of_heads, project_heads, run_layers
from lamella.model_executor.layers.torch_adapters import torch_adapter
from lamella.model_executor.layers.torch_experts import run_experts
from lamella.model_executor.layers.torch_functions import (
    activated,
    attention_gate,
    gated_activation,
    layer_norm,
    linear,
    rms_norm,
)
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.models.config import GateConfig, MLPConfig
from lamella.model_executor.step_attention import StepAttention
from lamella.model_executor.weights.forms import RowMajor


class TorchOperators:
    name = "torch"
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
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

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
        attention, config = layer.attention, layer.attention.config
        q, keys_values = project_heads(self, layer, normed, rows, inputs.adapters)
        q_bias, kv_bias = biases_of_heads(layer)
        of_queries = inputs.of_rows(rows)
        is_by_head = config.qk_norm != "projection"
        # [S, num_heads, k_dim]
        q = self._heads(_with_bias(q, q_bias), config.k_dim, attention.q_norm, of_queries.rotary, is_by_head)
        if of_queries.query_scale is not None:
            q = (q * of_queries.query_scale).to(q.dtype)
        if keys_values is None:
            return step(layer.index, q, None, None).flatten(1)
        k, v = _with_bias(keys_values, kv_bias).split([config.key_columns, config.value_columns], dim=-1)
        # [T, num_kv_heads, k_dim]
        k = self._heads(k, config.k_dim, attention.k_norm, inputs.rotary, is_by_head)
        v = v.unflatten(1, (-1, config.v_dim))
        if attention.v_norm is not None:
            v = self.norm(v, attention.v_norm)
        return step(layer.index, q, k, v).flatten(1)

    def _heads(
        self, columns: torch.Tensor, dim: int, norm: Norm | None, rotary: Rotary | None, is_by_head: bool
    ) -> torch.Tensor:
        """[T, heads * dim] -> [T, heads, dim], normed, each head or all as one row, and then rotated."""
        if norm is not None and not is_by_head:
            columns = self.norm(columns, norm)
        heads = columns.unflatten(1, (-1, dim))
        if norm is not None and is_by_head:
            heads = self.norm(heads, norm)
        return heads if rotary is None else apply_rotary(heads, rotary)

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        return linear(x, projection.weight[columns])

    def gate(
        self, attended: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, config: GateConfig
    ) -> torch.Tensor:
        return attention_gate(attended, _with_bias(gate, bias), config.activation)

    def experts(self, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        return run_experts(self, experts, x, routed)

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, config: MLPConfig) -> torch.Tensor:
        gate_up = _with_bias(gate_up, bias)
        if config.is_gated:
            return gated_activation(gate_up, config.activation, config.clamp)
        return activated(gate_up, config.activation)

    def multiply_activated(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        return activated(gate, activation).mul_(factor)

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
        y = _with_bias(y, bias)
        x = x + (y if post_norm is None else self.norm(y, post_norm))
        return x, x if next_norm is None else self.norm(x, next_norm)

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = linear(hidden, weight.weight).float()
        logits = logits if bias is None else logits + bias
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias
