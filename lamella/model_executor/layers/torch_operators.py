"""The operations in eager PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamella.model_executor.layers.contract import DecoderLayer, Norm, Projection, Rotary, StepAttention
from lamella.model_executor.layers.torch_functions import apply_rotary, gated_activation, linear, rms_norm
from lamella.model_executor.weights.forms import RowMajor


class TorchOperators:
    name = "torch"
    weight_form = RowMajor()

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        x = table.weight[token_ids]
        return x * torch.tensor(scale, dtype=x.dtype)

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
            qkv = linear(normed, layer.qkv_proj.weight).split(layer.heads.sizes, dim=-1)
            x, normed = self.finish_layer(layer, x, self._attend(attention, index, layer, qkv, rotary, rotary))
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
        num_query, *key_value = layer.heads.sizes
        weight = layer.qkv_proj.weight
        q = linear(x[output_rows], weight[:num_query])
        k, v = linear(x, weight[num_query:]).split(key_value, dim=-1)
        cos, sin = rotary
        return self._attend(attention, index, layer, (q, k, v), (cos[output_rows], sin[output_rows]), rotary)

    def _attend(
        self,
        attention: StepAttention,
        index: int,
        layer: DecoderLayer,
        qkv: tuple[torch.Tensor, ...],
        query_rotary: Rotary,
        key_rotary: Rotary,
    ) -> torch.Tensor:
        q, k, v = (part.unflatten(1, (-1, layer.heads.head_dim)) for part in qkv)
        q = apply_rotary(self.norm(q, layer.query_norm), query_rotary)
        k = apply_rotary(self.norm(k, layer.key_norm), key_rotary)
        return attention(index, q, k, v).flatten(1)

    def finish_layer(
        self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.norm(linear(attended, layer.o_proj.weight), layer.post_attention_norm)
        gate_up = linear(self.norm(x, layer.pre_mlp_norm), layer.gate_up_proj.weight)
        y = linear(gated_activation(gate_up, layer.activation), layer.down_proj.weight)
        x = x + self.norm(y, layer.post_mlp_norm)
        return x, self.norm(x, layer.following_norm)

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor:
        logits = linear(hidden, weight.weight).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
