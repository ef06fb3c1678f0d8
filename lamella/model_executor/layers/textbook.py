"""A decoder layer from top to bottom, one operation after the other.

This is the readable path: with `TorchOperators` it is what transformers computes, line by line, and the oracle of the
others. `TritonOperators` run it with operations that fuse more. The native kernels have a path of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lamella.model_executor.layers.contract import Rotary
from lamella.model_executor.layers.description import DecoderLayer, Norm, Projection
from lamella.model_executor.step_attention import StepAttention


class Operations(Protocol):
    """x is [T, width]. The bias of a projection is added by the operation that reads its product: so it comes after the
    sum over workers, and takes no pass of its own."""

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """x [T, num_in] by the weight: [T, len(columns)], of the outputs `columns`."""
        ...

    def attention(
        self,
        step: StepAttention,
        layer: DecoderLayer,
        rotary: Rotary | None,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """From the QKV projection of normed [T, width] to before the output projection: [S, num_heads * v_dim].

        K and V of all T tokens go to the cache. rows: int64 [S], the tokens whose queries are wanted; None: all.
        """
        ...

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """gate_up + bias [T, 2 * width], gate first -> activation(gate) * up, [T, width]."""
        ...

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
    rotaries: Sequence[Rotary | None],
    x: torch.Tensor,
    normed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Operators.run`."""
    next_norms = [*(layer.input_norm for layer in layers[1:]), following]
    for layer, rotary, next_norm in zip(layers, rotaries, next_norms, strict=True):
        x, normed = run_layer(operations, step, layer, next_norm, rotary, x, normed)
    return x, normed


def run_layer(
    operations: Operations,
    step: StepAttention,
    layer: DecoderLayer,
    next_norm: Norm | None,
    rotary: Rotary | None,
    x: torch.Tensor,
    normed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, width]: the residual stream; normed [T, width]: the layer's input norm of it.

    Returns the stream after the layer, and next_norm of it, of the S tokens that leave the layer.
    """
    # Tokens that are not in `rows` give K and V, which later tokens of this layer see, and end here.
    rows = step.output_rows(layer.index)
    attended = operations.attention(step, layer, rotary, normed, rows)  # [S, num_heads * v_dim]
    if rows is not None:
        x = x[rows]
    o_proj, mlp = layer.attention.o_proj, layer.mlp
    y = reduce(project(operations, o_proj, attended))
    x, normed = operations.add(x, y, o_proj.bias, layer.post_attention_norm, layer.mlp_norm)
    gate_up = project(operations, mlp.gate_up_proj, normed)
    activated = operations.activate(gate_up, mlp.gate_up_proj.bias, mlp.config.activation)
    y = reduce(project(operations, mlp.down_proj, activated))
    return operations.add(x, y, mlp.down_proj.bias, layer.post_mlp_norm, next_norm)


def project(
    operations: Operations, projection: Projection, x: torch.Tensor, columns: slice | None = None
) -> torch.Tensor:
    """A linear layer without its bias, or the outputs `columns` of it. Every linear layer of this path is applied here:
    this is the place for what adapters add and for shards."""
    return operations.multiply(projection, x, slice(0, projection.num_out) if columns is None else columns)


def reduce(y: torch.Tensor) -> torch.Tensor:
    """The sum over all workers of what each has computed of a layer's output. With one worker it is what that one has
    computed."""
    return y


def project_heads(
    operations: Operations, layer: DecoderLayer, normed: torch.Tensor, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries of `rows` (None: of all), and keys and values of all tokens side by side, before any bias; None in place
    of keys and values where the layer reads another's. It is one product where both are of the same tokens."""
    projection, num_query = layer.attention.qkv_proj, layer.attention.config.query_columns
    if projection.num_out == num_query:
        return project(operations, projection, normed if rows is None else normed[rows]), None
    if rows is None:
        columns = project(operations, projection, normed)
        return columns[:, :num_query], columns[:, num_query:]
    queries = project(operations, projection, normed[rows], slice(0, num_query))
    return queries, project(operations, projection, normed, slice(num_query, projection.num_out))


def biases_of_heads(layer: DecoderLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The biases of what `project_heads` gives."""
    bias, num_query = layer.attention.qkv_proj.bias, layer.attention.config.query_columns
    return (None, None) if bias is None else (bias[:num_query], bias[num_query:])
