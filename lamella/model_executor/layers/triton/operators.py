"""The operations on a GPU: matrix products by torch, everything between them in fused Triton kernels.

A layer is four products, attention, and four kernels of ours (docs/gpu.md). The residual stream changes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from lamella.attention.native_backend import HeadTransform
from lamella.model_executor.layers.contract import DecoderLayer, Norm, Projection, Rotary, StepAttention
from lamella.model_executor.layers.triton.activation import capped_logits, gated_activation
from lamella.model_executor.layers.triton.heads import transform_heads
from lamella.model_executor.layers.triton.norm import add_norm, rms_norm
from lamella.model_executor.weights.forms import RowMajor


class TritonOperators:
    """Goes with the triton backend, whose pages its kernels write. No call waits for the device, and what is launched
    follows from shapes alone, so that steps can be captured as CUDA graphs."""

    name = "triton"
    weight_form = RowMajor()

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x.mul_(torch.tensor(scale, dtype=x.dtype))

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def run_layers(
        self,
        attention: StepAttention,
        first: int,
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[Rotary],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for index, (layer, rotary) in enumerate(zip(layers, rotaries, strict=True), first):
            heads, target = layer.heads, attention.kv_target(index)
            queries = transform_heads(
                linear(normed, layer.qkv_proj.weight),
                _transform(layer, rotary),
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                **target._asdict(),
            )
            x, normed = self.finish_layer(layer, x, attention.attend_written(index, queries).flatten(1))
        return x, normed

    def attend(
        self,
        attention: StepAttention,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rotary: Rotary,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        heads, target = layer.heads, attention.kv_target(index)
        num_query = heads.sizes[0]
        weight, transform = layer.qkv_proj.weight, _transform(layer, rotary)
        transform_heads(
            linear(x, weight[num_query:]),
            transform,
            num_heads=0,
            num_kv_heads=heads.num_kv_heads,
            **target._asdict(),
        )
        queries = transform_heads(
            linear(x[output_rows], weight[:num_query]),
            transform.of_rows(output_rows),
            num_heads=heads.num_heads,
            num_kv_heads=0,
            **target._asdict(),
        )
        return attention.attend_written(index, queries).flatten(1)

    def finish_layer(
        self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = _add_norm(x, linear(attended, layer.o_proj.weight), layer.post_attention_norm, layer.pre_mlp_norm)
        activated = gated_activation(linear(normed, layer.gate_up_proj.weight), layer.activation)
        y = linear(activated, layer.down_proj.weight)
        return x, _add_norm(x, y, layer.post_mlp_norm, layer.following_norm)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight)
        return logits.float() if softcap is None else capped_logits(logits, softcap)


def _transform(layer: DecoderLayer, rotary: Rotary) -> HeadTransform:
    return HeadTransform(layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.eps, *rotary)


def _add_norm(x: torch.Tensor, y: torch.Tensor, post_norm: Norm, next_norm: Norm) -> torch.Tensor:
    """y's norm into x, in place; the next norm of that."""
    return add_norm(
        x,
        y,
        post_weight=post_norm.weight,
        post_eps=post_norm.eps,
        next_weight=next_norm.weight,
        next_eps=next_norm.eps,
    )
