"""Gemma 3 text models (arXiv 2503.19786): five sliding-window layers to each full one, QK norm,
four norms a layer, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from lamella.attention.backend import AttentionParams
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers import rotary_tables
from lamella.model_executor.model_config import ModelConfig
from lamella.model_executor.operators.base import (
    HeadScores,
    HeadShape,
    Norm,
    Operators,
    Projection,
    StepAttention,
)

# name, outputs, inputs -> a layer of the model's own kind
MakeProjection = Callable[[str, int, int], Projection]


class _Attention(nn.Module):
    def __init__(self, name: str, config: ModelConfig, make: MakeProjection) -> None:
        super().__init__()
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv_proj = make(f"{name}.qkv_proj", sum(self.heads.sizes), config.hidden_size)
        self.o_proj = make(f"{name}.o_proj", config.hidden_size, self.heads.sizes[0])
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)


class _MLP(nn.Module):
    def __init__(self, name: str, config: ModelConfig, make: MakeProjection) -> None:
        super().__init__()
        self.gate_up_proj = make(f"{name}.gate_up_proj", 2 * config.intermediate_size, config.hidden_size)
        self.down_proj = make(f"{name}.down_proj", config.hidden_size, config.intermediate_size)


class _Layer(nn.Module):
    def __init__(self, name: str, config: ModelConfig, make: MakeProjection) -> None:
        super().__init__()
        self.self_attn = _Attention(f"{name}.self_attn", config, make)
        self.mlp = _MLP(f"{name}.mlp", config, make)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class Gemma3ForCausalLM(nn.Module):
    """Parameters start without memory (meta tensors); `load` gives them their tensors."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, operators: Operators) -> None:
        super().__init__()

        def make(name: str, num_out: int, num_in: int) -> Projection:
            return Projection(f"{name}.weight", num_out, num_in, operators, dtype)

        self.config = config
        self.dtype = dtype
        self.operators = operators
        self.embed_tokens = make("embed_tokens", config.vocab_size, config.hidden_size)
        self.ropes = [(layer.rope_theta, layer.rope_scale) for layer in config.layers]
        self._stack = [_Layer(f"layers.{layer}", config, make) for layer in range(config.num_layers)]
        self.layers = nn.ModuleList(self._stack)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else make("lm_head", config.vocab_size, config.hidden_size)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each parameter, weights as [num_out, num_in] whatever form they are stored in."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                shapes[f"{name}.weight"] = (module.num_out, module.num_in)
            elif isinstance(module, Norm):
                shapes[f"{name}.weight"] = tuple(module.weight.shape)
        return shapes

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

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """token_ids, positions: int64 [T]. Returns [S, hidden_size], of the tokens that leave the last layer."""
        operators = self.operators
        ropes = {
            rope: rotary_tables(positions, self.config.head_dim, rope[0], rope[1], self.dtype)
            for rope in set(self.ropes)
        }
        x = operators.embed(self.embed_tokens, token_ids, self.config.hidden_size**0.5)
        normed = operators.norm(x, self._stack[0].input_layernorm)
        last = len(self._stack) - 1
        for index, (layer, rope) in enumerate(zip(self._stack, self.ropes, strict=True)):
            attn, mlp = layer.self_attn, layer.mlp
            rows = attention.output_rows(index)
            attended = operators.attend(
                attention, index, attn.qkv_proj, normed, attn.heads, (attn.q_norm, attn.k_norm), ropes[rope], rows
            )
            if rows is not None:
                x = x[rows]
                ropes = {each: (cos[rows], sin[rows]) for each, (cos, sin) in ropes.items()}
            attended = operators.linear(attn.o_proj, attended)
            x, normed = operators.add_norm(x, attended, layer.post_attention_layernorm, layer.pre_feedforward_layernorm)
            gated = operators.gated_gelu(operators.linear(mlp.gate_up_proj, normed))
            following = self.norm if index == last else self._stack[index + 1].input_layernorm
            x, normed = operators.add_norm(
                x, operators.linear(mlp.down_proj, gated), layer.post_feedforward_layernorm, following
            )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | HeadScores:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] (may be a transposed view), or what computes parts."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return self.operators.head(head, hidden, self.config.final_logit_softcap)
