"""The operations in eager PyTorch, on any device."""

from __future__ import annotations

import torch

from lamella.model_executor.layers import apply_rotary, gated_activation, linear, rms_norm
from lamella.model_executor.operators.base import HeadShape, LayerTail, Norm, Projection, Rotary, StepAttention
from lamella.model_executor.weight_forms import RowMajor


class TorchOperators:
    name = "torch"
    weight_form = RowMajor()

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x * torch.tensor(scale, dtype=x.dtype)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def finish_layer(
        self, tail: LayerTail, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.norm(linear(attended, tail.o_proj.weight), tail.post_attention_norm)
        gate_up = linear(self.norm(x, tail.pre_mlp_norm), tail.gate_up_proj.weight)
        y = linear(gated_activation(gate_up, tail.activation), tail.down_proj.weight)
        x = x + self.norm(y, tail.post_mlp_norm)
        return x, self.norm(x, tail.following_norm)

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
        shape = (x.shape[0], -1, heads.head_dim)
        q, k, v = (part.reshape(shape) for part in linear(x, projection.weight).split(heads.sizes, dim=-1))
        q = apply_rotary(self.norm(q, norms[0]), rotary)
        k = apply_rotary(self.norm(k, norms[1]), rotary)
        out = attention(layer, q, k, v).flatten(1)
        return out if output_rows is None else out[output_rows]

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
