"""Gemma 3 text models (arXiv 2503.19786): five sliding-window layers to each full one, QK norm,
four norms a layer, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from lamella.attention.backend import AttentionParams
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers import apply_rotary, gated_gelu, linear, rms_norm, rotary_tables
from lamella.model_executor.model_config import ModelConfig


class LayerAttention(Protocol):
    """Attention of one step, all layers: writes k and v to the cache, returns what q sees."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim]."""
        ...


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class _Projection(nn.Module):
    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(out_features, in_features, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = _weight(width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        self.head_dim = config.head_dim
        self.qkv_proj = _Projection(sum(self.sizes), config.hidden_size, dtype)
        self.o_proj = _Projection(config.hidden_size, self.sizes[0], dtype)
        self.q_norm = _Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = _Norm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: LayerAttention,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        num_tokens = x.shape[0]
        q = apply_rotary(self.q_norm(q.reshape(num_tokens, -1, self.head_dim)), rotary)
        k = apply_rotary(self.k_norm(k.reshape(num_tokens, -1, self.head_dim)), rotary)
        out = attention(self.layer, q, k, v.reshape(num_tokens, -1, self.head_dim)).flatten(1)
        return self.o_proj(out if output_rows is None else out[output_rows])


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = _Projection(2 * config.intermediate_size, config.hidden_size, dtype)
        self.down_proj = _Projection(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_gelu(self.gate_up_proj(x)))


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer, dtype)
        self.mlp = _MLP(config, dtype)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: LayerAttention,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, attention, output_rows)
        if output_rows is not None:
            x = x[output_rows]
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3ForCausalLM(nn.Module):
    """Parameters start without memory (meta tensors); `load` gives them their tensors."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = _Projection(config.vocab_size, config.hidden_size, dtype)
        self.ropes = [(layer.rope_theta, layer.rope_scale) for layer in config.layers]
        self.layers = nn.ModuleList(_Layer(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else _Projection(config.vocab_size, config.hidden_size, dtype)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors as they are, without a copy (they may be memory-mapped)."""
        self.load_state_dict(weights, strict=True, assign=True)
        self.requires_grad_(False)

    def attention_params(self, specs: list[KVCacheSpec]) -> list[AttentionParams]:
        """specs: what each layer sees (not how long its KV is kept)."""
        config = self.config
        return [
            AttentionParams(
                spec=spec,
                num_heads=config.num_heads,
                scale=config.query_scale,
                softcap=config.attn_logit_softcap,
            )
            for spec in specs
        ]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention, output_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids, positions: int64 [T]; output_rows: int64 [S], the tokens whose hidden state is wanted.

        Returns [S, hidden_size]. In the last layer the other tokens get their K and V and no more.
        """
        x = self.embed_tokens.weight[token_ids]
        x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)
        tables = {
            rope: rotary_tables(positions, self.config.head_dim, rope[0], rope[1], self.dtype)
            for rope in set(self.ropes)
        }
        last = len(self.ropes) - 1
        for index, (layer, rope) in enumerate(zip(self.layers, self.ropes, strict=True)):
            x = layer(x, tables[rope], attention, output_rows if index == last else None)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] (may be a transposed view)."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = head(hidden).float()
        cap = self.config.final_logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
