"""The operations in eager PyTorch, on any device."""

from __future__ import annotations

import torch

from lamella.model_executor.layers import apply_rotary, gated_gelu, linear, rms_norm
from lamella.model_executor.operators.base import HeadShape, Norm, Projection, Rotary, StepAttention
from lamella.model_executor.weight_forms import RowMajor


class TorchOperators:
    name = "torch"
    weight_form = RowMajor()

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x * torch.tensor(scale, dtype=x.dtype)

    def linear(self, weight: Projection, x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight.weight)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor, post: Norm, following: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.norm(y, post)
        return x, self.norm(x, following)

    def gated_gelu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_gelu(gate_up)

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
        q, k, v = (part.reshape(shape) for part in self.linear(projection, x).split(heads.sizes, dim=-1))
        q = apply_rotary(self.norm(q, norms[0]), rotary)
        k = apply_rotary(self.norm(k, norms[1]), rotary)
        out = attention(layer, q, k, v).flatten(1)
        return out if output_rows is None else out[output_rows]

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
