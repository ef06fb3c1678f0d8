"""What models are made of: weights, and the operations on them that have a torch, a native and a triton form.

A model is written once, against `Operators`. The operations are as coarse as the native kernels are: what is fused
there is one method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.step_attention import KVTarget
from lamella.model_executor.weights.forms import WeightForm
from lamella.native.decoder import DecoderWeights

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin, see layers.rotary_tables


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> list[int]:
        """Columns of Q, K and V in a fused projection."""
        return [self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]


class Norm(nn.Module):
    """An RMS norm's multiplier, float32 [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32, device="meta"), requires_grad=False)
        self.eps = eps


class Projection(nn.Module):
    """A linear layer's weight [num_out, num_in], stored in the form that the operators want.

    derived: what operators make of the loaded weight once and use in every step.
    """

    weight: torch.Tensor
    scales: torch.Tensor  # where the form has them

    def __init__(self, name: str, num_out: int, num_in: int, operators: Operators, dtype: torch.dtype) -> None:
        """name: of the weight in the model, "layers.0.mlp.down_proj.weight"."""
        super().__init__()
        self.name = name
        self.num_out = num_out
        self.num_in = num_in
        self.derived: dict[Any, Any] = {}
        for ending, (shape, stored_dtype) in operators.weight_form.tensors(name, (num_out, num_in), dtype).items():
            empty = torch.empty(shape, dtype=stored_dtype, device="meta")
            self.register_parameter(ending, nn.Parameter(empty, requires_grad=False))


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The parts of a layer in their order, and the norm of what comes next. derived: as a Projection's."""

    qkv_proj: Projection
    heads: HeadShape
    query_norm: Norm  # of each head
    key_norm: Norm
    o_proj: Projection
    post_attention_norm: Norm
    pre_mlp_norm: Norm
    gate_up_proj: Projection  # gate first
    down_proj: Projection
    post_mlp_norm: Norm
    following_norm: Norm
    activation: str  # native.elementwise.ACTIVATIONS
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)


class HeadScores(Protocol):
    """The next token's logits, of which only what is asked for is computed."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [len(rows), vocab] of the given rows (int64); may be a transposed view."""
        ...

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n], logits float32 [n]): each row's largest logit, the lowest id among equals."""
        ...

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n, num_top], logits float32 [n, num_top]): largest first, the lowest id among equals."""
        ...


class StepAttention(Protocol):
    """Attention of one step, all layers: writes K and V to the cache, returns what each query sees."""

    def output_rows(self, layer: int) -> torch.Tensor | None:
        """Which of the layer's T tokens leave it, and are the next one's: int64 [S], or None for all."""
        ...

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [S, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [S, num_heads, head_dim]."""
        ...

    def run_layers(
        self,
        first: int,
        weights: Sequence[DecoderWeights],
        rotaries: Sequence[Rotary],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """Layers from `first` on, attention and all, on the native backend only. x and normed change in place."""
        ...

    def fused_outputs(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        transform: HeadTransform,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """K and V of all tokens, queries of those that leave the layer, on the native backend only."""
        ...

    def kv_target(self, layer: int) -> KVTarget:
        """Where operators that write K and V themselves put them, on the triton backend only."""
        ...

    def attend_written(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q [S, num_heads, head_dim] where K and V of this step's tokens are in their pages already."""
        ...


class Operators(Protocol):
    """x is [T, width]; everything returns tensors of the model's dtype unless said otherwise."""

    name: str

    @property
    def weight_form(self) -> WeightForm: ...

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows of the table, times `scale`: a new tensor [T, num_in]."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def finish_layer(
        self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's part after attention: its result [T, num_heads * head_dim] into the residual stream x [T, width],
        then the MLP's; also the following norm of that. x may be overwritten."""
        ...

    def run_layers(
        self,
        attention: StepAttention,
        first: int,
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[Rotary],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens through layers `first` and following: x [T, width] is the residual stream, normed its norm by the
        first layer's. Returns both as they are after the last. They may be overwritten."""
        ...

    def attend(
        self,
        attention: StepAttention,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rotary: Rotary,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """The attention of layer `index` on x, from its fused QKV projection to before its output projection.

        output_rows: int64 [S]; only these rows are wanted, the others give K and V and no more. Returns
        [S, num_heads * head_dim].
        """
        ...

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor | HeadScores:
        """Logits of hidden [S, width] against the rows of `weight`: float32 [S, num_out] (may be a transposed view), or
        what computes as much of them as is asked for."""
        ...
