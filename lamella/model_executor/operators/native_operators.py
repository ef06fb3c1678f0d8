"""The operations by the native CPU kernels, float32: the same bits for a token whatever comes with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.operators.base import HeadShape, Norm, Projection, Rotary, StepAttention
from lamella.model_executor.weight_forms import Panels
from lamella.native.elementwise import add_norm, gated_activation, softcap
from lamella.native.linear import PackedWeight, gather_rows, linear, linear_topk


class NativeOperators:
    name = "native"
    weight_form = Panels()

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return gather_rows(_packed(table), token_ids, scale)

    def linear(self, weight: Projection, x: torch.Tensor) -> torch.Tensor:
        return linear(x, _packed(weight))

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
        weight = _packed(projection)
        query_norm, key_norm = norms
        transform = HeadTransform(query_norm.weight, key_norm.weight, query_norm.eps, *rotary)
        if output_rows is None:
            return attention.fused(layer, linear(x, weight), transform).flatten(1)
        # K and V of all, Q of the rows that are wanted: panels lie one after the other, so both are parts of one weight
        num_query = heads.sizes[0]
        queries = linear(x[output_rows], _part(weight, 0, num_query))
        keys_values = linear(x, _part(weight, num_query, weight.num_out))
        return attention.fused_outputs(layer, queries, keys_values, transform, output_rows).flatten(1)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> NativeScores:
        return NativeScores(_packed(weight), hidden, softcap)


@dataclass(frozen=True, slots=True)
class NativeScores:
    """See HeadScores. cap: the logits' soft-cap."""

    weight: PackedWeight
    hidden: torch.Tensor
    cap: float | None

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        scores = linear(self.hidden[rows], self.weight)
        return scores if self.cap is None else softcap(scores, self.cap)

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, values = self.top(rows, 1)
        return ids[:, 0], values[:, 0]

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cap is not None:
            # A cap can make different scores equal, and then the lower id counts: all must be seen.
            values, ids = self.logits(rows).sort(dim=1, descending=True, stable=True)
            return ids[:, :num_top], values[:, :num_top]
        found = linear_topk(self.hidden[rows], self.weight, min(num_top, self.weight.num_out))
        return found.ids, found.values


def _packed(projection: Projection) -> PackedWeight:
    return PackedWeight(projection.weight, projection.num_out, projection.num_in)


def _part(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Outputs [start, stop), start a multiple of a panel."""
    panel = weight.data.shape[2]
    return PackedWeight(weight.data[start // panel : -(-stop // panel)], stop - start, weight.num_in)
