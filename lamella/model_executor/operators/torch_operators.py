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
        num_query, *key_value = heads.sizes
        q_rotary = rotary
        if output_rows is None:
            q, k, v = self.linear(projection, x).split(heads.sizes, dim=-1)
        else:
            q = linear(x[output_rows], projection.weight[:num_query])
            k, v = linear(x, projection.weight[num_query:]).split(key_value, dim=-1)
            q_rotary = (rotary[0][output_rows], rotary[1][output_rows])
        q, k, v = (part.unflatten(1, (-1, heads.head_dim)) for part in (q, k, v))
        q = apply_rotary(self.norm(q, norms[0]), q_rotary)
        k = apply_rotary(self.norm(k, norms[1]), rotary)
        return attention(layer, q, k, v).flatten(1)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
