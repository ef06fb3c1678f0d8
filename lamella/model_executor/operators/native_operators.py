"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it."""

from __future__ import annotations

import torch

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.operators.base import (
    HeadScores,
    HeadShape,
    Norm,
    Projection,
    Rotary,
    StepAttention,
)
from lamella.model_executor.operators.linear_kinds import LinearKind
from lamella.model_executor.weight_forms import WeightForm
from lamella.native.elementwise import add_norm, gated_activation


class NativeOperators:
    name = "native"

    def __init__(self, kind: LinearKind) -> None:
        self._kind = kind

    @property
    def weight_form(self) -> WeightForm:
        return self._kind.weight_form

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._kind.gather(table, token_ids, scale)

    def linear(self, weight: Projection, x: torch.Tensor) -> torch.Tensor:
        return self._kind.linear(weight, x, 0, weight.num_out)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return add_norm(x, None, None, norm.weight, norm.eps)

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor, post: Norm, following: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, add_norm(x, y, post.weight, following.weight, following.eps)

    def gated_gelu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated_activation(gate_up, "gelu_tanh")

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
        query_norm, key_norm = norms
        transform = HeadTransform(query_norm.weight, key_norm.weight, query_norm.eps, *rotary)
        if output_rows is None:
            return attention.fused(layer, self.linear(projection, x), transform).flatten(1)
        # K and V of all, Q of the rows that are wanted.
        num_query = heads.sizes[0]
        queries = self._kind.linear(projection, x[output_rows], 0, num_query)
        keys_values = self._kind.linear(projection, x, num_query, projection.num_out)
        return attention.fused_outputs(layer, queries, keys_values, transform, output_rows).flatten(1)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> HeadScores:
        return self._kind.head(weight, hidden, softcap)
