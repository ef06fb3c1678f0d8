"""A decoder layer from top to bottom, one operation after the other.

This is the readable path: with `TorchOperators` it is what transformers computes, line by line, and the oracle of the
others. `TritonOperators` run it with operations that fuse more. The native kernels have a path of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lamella.model_executor.layers.adapters import RowAdapters
from lamella.model_executor.layers.contract import LayerInputs
from lamella.model_executor.layers.description import (
    DecoderLayer,
    DenseMLP,
    Experts,
    ExpertsBeside,
    Norm,
    PerLayerGate,
    Projection,
)
from lamella.model_executor.layers.worker_sum import WorkerSum
from lamella.model_executor.models.config import GateConfig, MLPConfig
from lamella.model_executor.step_attention import StepAttention


class Operations(Protocol):
    """x is [T, width]. The bias of a projection is added by the operation that reads its product: so it comes after the
    sum over workers, and takes no pass of its own. workers: who computes each layer together."""

    @property
    def workers(self) -> WorkerSum: ...

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """x [T, num_in] by the weight: [T, len(columns)], of the outputs `columns`."""
        ...

    def attention(
        self,
        step: StepAttention,
        layer: DecoderLayer,
        inputs: LayerInputs,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """From the QKV projection of normed [T, width] to before the output projection: [S, num_heads * v_dim].

        K and V of all T tokens go to the cache. rows: int64 [S], the tokens whose queries are wanted; None: all.
        """
        ...

    def gate(
        self, attended: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, config: GateConfig
    ) -> torch.Tensor:
        """attended [S, num_heads * v_dim] * activation(gate + bias), gate [S, num_heads] or as wide as attended.
        attended may be overwritten."""
        ...

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, config: MLPConfig) -> torch.Tensor:
        """gate_up + bias [T, 2 * width], gate first -> activation(gate) * up, [T, width]; of an MLP that is not gated,
        up + bias [T, width] -> activation(up)."""
        ...

    def experts(self, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, width] -> what its experts give, and the shared one, biases and all: [T, width]. routed [T, width]:
        what the router reads; None: x."""
        ...

    def multiply_activated(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * factor, each [T, width]."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        post_norm: Norm | None,
        next_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + post_norm(y + bias), and next_norm of that sum. Where a norm is None, its input goes on as it is. x may
        be overwritten."""
        ...


def run_layers(
    operations: Operations,
    step: StepAttention,
    layers: Sequence[DecoderLayer],
    following: Norm | None,
    inputs: Sequence[LayerInputs],
    x: torch.Tensor,
    normed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Operators.run`."""
    next_norms = [*(layer.input_norm for layer in layers[1:]), following]
    for layer, its_inputs, next_norm in zip(layers, inputs, next_norms, strict=True):
        x, normed = run_layer(operations, step, layer, next_norm, its_inputs, x, normed)
    return x, normed


def run_layer(
    operations: Operations,
    step: StepAttention,
    layer: DecoderLayer,
    next_norm: Norm | None,
    inputs: LayerInputs,
    x: torch.Tensor,
    normed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, width]: the residual stream; normed [T, width]: the layer's input norm of it.

    Returns the stream after the layer, and next_norm of it, of the S tokens that leave the layer.
    """
    # Tokens that are not in `rows` give K and V, which later tokens of this layer see, and end here.
    rows = step.output_rows(layer.index)
    attended = operations.attention(step, layer, inputs, normed, rows)  # [S, num_heads * v_dim]
    if rows is not None:
        x, normed, inputs = x[rows], normed[rows], inputs.of_rows(rows)
    return finish_layer(operations, layer, next_norm, inputs, x, normed, attended)


def finish_layer(
    operations: Operations,
    layer: DecoderLayer,
    next_norm: Norm | None,
    inputs: LayerInputs,
    x: torch.Tensor,
    normed: torch.Tensor,
    attended: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows a layer's attention, of the tokens that leave the layer: as `run_layer`."""
    attention, adapters = layer.attention, inputs.adapters
    if attention.gate_proj is not None:
        assert attention.config.gate is not None
        gate = project(operations, attention.gate_proj, normed, adapters)
        attended = operations.gate(attended, gate, attention.gate_proj.bias, attention.config.gate)
    o_proj = attention.o_proj
    y = reduce(operations, project(operations, o_proj, attended, adapters))
    if layer.is_parallel:
        of_mlp, bias = run_mlp(operations, layer.mlp, normed, adapters)
        x, _ = operations.add(x, y, o_proj.bias, layer.post_attention_norm, None)
        y = of_mlp
    else:
        x, normed = operations.add(x, y, o_proj.bias, layer.post_attention_norm, layer.mlp_norm)
        y, bias = run_mlp(operations, layer.mlp, normed, adapters)
    if layer.experts_beside is not None:
        y, bias = with_experts_beside(operations, layer.experts_beside, x, y), None
    if layer.per_layer_gate is None and layer.scalar is None:
        return operations.add(x, y, bias, layer.post_mlp_norm, next_norm)
    x, _ = operations.add(x, y, bias, layer.post_mlp_norm, None)
    if layer.per_layer_gate is not None:
        assert inputs.per_layer is not None
        y = run_per_layer_gate(operations, layer.per_layer_gate, inputs.per_layer, x, adapters)
        x, _ = operations.add(x, y, None, layer.per_layer_gate.norm, None)
    if layer.scalar is not None:
        x = x * layer.scalar.values.to(x.dtype)
    return x, x.clone() if next_norm is None else operations.norm(x, next_norm)


def run_mlp(
    operations: Operations, mlp: DenseMLP | Experts, normed: torch.Tensor, adapters: RowAdapters | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """normed [T, width] -> what the MLP makes of it, without the bias of its last projection, and that bias."""
    if isinstance(mlp, Experts):
        return reduce(operations, operations.experts(mlp, normed)), None
    return reduce(operations, run_dense(operations, mlp, normed, adapters)), mlp.down_proj.bias


def run_dense(
    operations: Operations, mlp: DenseMLP, normed: torch.Tensor, adapters: RowAdapters | None = None
) -> torch.Tensor:
    """normed [T, width] -> what the MLP makes of it, before the sum over workers and the last projection's bias."""
    gate_up = project(operations, mlp.gate_up_proj, normed, adapters)
    activated = operations.activate(gate_up, mlp.gate_up_proj.bias, mlp.config)
    return project(operations, mlp.down_proj, activated, adapters)


def with_experts_beside(
    operations: Operations, beside: ExpertsBeside, x: torch.Tensor, of_mlp: torch.Tensor
) -> torch.Tensor:
    """x [T, width]: the residual stream that the MLP has read; of_mlp: what it gave, which has no bias."""
    routed = operations.norm(x, beside.router_norm)
    given = reduce(operations, operations.experts(beside.experts, operations.norm(x, beside.norm), routed))
    return operations.norm(of_mlp, beside.mlp_post_norm) + operations.norm(given, beside.post_norm)


def run_per_layer_gate(
    operations: Operations,
    gate: PerLayerGate,
    per_layer: torch.Tensor,
    x: torch.Tensor,
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    """x [T, width], per_layer [T, width of the layer's own input] -> [T, width], before the norm. Each worker computes
    all of it."""
    gated = operations.multiply_activated(project(operations, gate.gate, x, adapters), per_layer, gate.activation)
    return project(operations, gate.projection, gated, adapters)


def project(
    operations: Operations,
    projection: Projection,
    x: torch.Tensor,
    adapters: RowAdapters | None = None,
    columns: slice | None = None,
) -> torch.Tensor:
    """A linear layer without its bias, or the outputs `columns` of it, with what the rows' adapters add. Every linear
    layer of this path is applied here: this is the place for shards, too."""
    columns = slice(0, projection.num_out) if columns is None else columns
    y = operations.multiply(projection, x, columns)
    if adapters is not None:
        adapters.add_to(y, projection.name, x, columns)
    return y


def reduce(operations: Operations, y: torch.Tensor) -> torch.Tensor:
    """The sum over all workers of what each has computed of a layer's output. With one worker it is what that one has
    computed."""
    return operations.workers.sum(y)


def project_heads(
    operations: Operations,
    layer: DecoderLayer,
    normed: torch.Tensor,
    rows: torch.Tensor | None,
    adapters: RowAdapters | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries of `rows` (None: of all), and keys and values of all tokens side by side, before any bias; None in place
    of keys and values where the layer reads another's. It is one product where both are of the same tokens. adapters:
    of all tokens."""
    projection, num_query = layer.attention.qkv_proj, layer.attention.config.query_columns
    of_queries = None if adapters is None else adapters.of_rows(rows)
    if projection.num_out == num_query:
        return project(operations, projection, normed if rows is None else normed[rows], of_queries), None
    if rows is None:
        columns = project(operations, projection, normed, adapters)
        return columns[:, :num_query], columns[:, num_query:]
    queries = project(operations, projection, normed[rows], of_queries, slice(0, num_query))
    return queries, project(operations, projection, normed, adapters, slice(num_query, projection.num_out))


def biases_of_heads(layer: DecoderLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The biases of what `project_heads` gives."""
    bias, num_query = layer.attention.qkv_proj.bias, layer.attention.config.query_columns
    return (None, None) if bias is None else (bias[:num_query], bias[num_query:])
