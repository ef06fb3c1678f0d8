"""The operations on a GPU: matrix products by torch, everything between them in fused Triton kernels.

A layer is four products, attention, and four kernels of ours (docs/gpu.md). The residual stream changes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from lamella.attention.native_backend import HeadTransform
from lamella.errors import InvariantError
from lamella.model_executor.layers.contract import Rotary
from lamella.model_executor.layers.description import DecoderLayer, Model, Norm, Projection
from lamella.model_executor.layers.head_transform import head_transform
from lamella.model_executor.layers.textbook import biases_of_heads, project, project_heads, run_layers
from lamella.model_executor.layers.triton.activation import capped_logits, gated_activation
from lamella.model_executor.layers.triton.heads import transform_heads
from lamella.model_executor.layers.triton.norm import add_norm, rms_norm
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.weights.forms import RowMajor


class TritonOperators:
    """Goes with the triton backend, whose pages its kernels write. No call waits for the device, and what is launched
    follows from shapes alone, so that steps can be captured as CUDA graphs."""

    name = "triton"
    weight_form = RowMajor()

    def prepare(self, model: Model) -> None:
        """Does nothing: weights are used as they are stored."""

    def unsupported(self, layer: DecoderLayer) -> str | None:
        return None

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x if scale == 1.0 else x.mul_(torch.tensor(scale, dtype=x.dtype))

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        rotaries: Sequence[Rotary | None],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_layers(self, step, layers, following, rotaries, x, normed)

    def attention(
        self,
        step: StepAttention,
        layer: DecoderLayer,
        rotary: Rotary | None,
        normed: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """K and V go from their projection into the pages in one kernel, together with the queries where these are of
        the same tokens."""
        config = layer.attention.config
        place, slots = _place(step, layer), step.taken(layer.index).slot_mapping
        transform = head_transform(layer, rotary)
        q_bias, kv_bias = biases_of_heads(layer)
        if rows is None:
            projection = layer.attention.qkv_proj
            columns = project(self, projection, normed)
            num_kv_heads = 0 if config.kv_owner is not None else config.num_kv_heads
            queries = _heads(columns, projection.bias, transform, config.num_heads, num_kv_heads, place, slots)
        else:
            columns, keys_values = project_heads(self, layer, normed, rows)
            if keys_values is not None:
                _heads(keys_values, kv_bias, transform, 0, config.num_kv_heads, place, slots)
            queries = _heads(columns, q_bias, transform.of_rows(rows), config.num_heads, 0, place, slots)
        return step.attend_written(layer.index, queries).flatten(1)

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        return linear(x, projection.weight[columns])

    def activate(self, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return gated_activation(gate_up, activation, bias)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        post_norm: Norm | None,
        next_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight)
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
