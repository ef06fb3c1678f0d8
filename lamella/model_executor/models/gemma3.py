"""Gemma 3 text models (arXiv 2503.19786): five sliding-window layers to each full one, QK norm,
four norms a layer, tied embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from lamella.attention.contract import AttentionParams
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers.contract import (
    DecoderLayer,
    HeadScores,
    HeadShape,
    Norm,
    Operators,
    Projection,
    StepAttention,
)
from lamella.model_executor.layers.torch_functions import rotary_frequencies, rotary_tables
from lamella.model_executor.models.config import ModelConfig

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

    def parts(self, following_norm: Norm) -> DecoderLayer:
        """As operators want them; following_norm: the one that comes after this layer."""
        attention = self.self_attn
        return DecoderLayer(
            attention.qkv_proj,
            attention.heads,
            attention.q_norm,
            attention.k_norm,
            attention.o_proj,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.mlp.gate_up_proj,
            self.mlp.down_proj,
            self.post_feedforward_layernorm,
            following_norm,
            activation="gelu_tanh",
        )


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
        following = [*(layer.input_layernorm for layer in self._stack[1:]), self.norm]
        self._decoder = [layer.parts(norm) for layer, norm in zip(self._stack, following, strict=True)]
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
        device = self.norm.weight.device
        self._frequencies = {
            rope: rotary_frequencies(self.config.head_dim, *rope, device) for rope in dict.fromkeys(self.ropes)
        }

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
            rope: rotary_tables(positions, frequencies, self.dtype) for rope, frequencies in self._frequencies.items()
        }
        x = operators.embed(self.embed_tokens, token_ids, self.config.hidden_size**0.5)
        normed = operators.norm(x, self._stack[0].input_layernorm)
        index, num_layers = 0, len(self._decoder)
        while index < num_layers:
            rows, stop = attention.output_rows(index), index + 1
            if rows is None:  # as many layers at once as all tokens leave
                while stop < num_layers and attention.output_rows(stop) is None:
                    stop += 1
                rotaries = [ropes[rope] for rope in self.ropes[index:stop]]
                x, normed = operators.run_layers(attention, index, self._decoder[index:stop], rotaries, x, normed)
            else:
                layer = self._decoder[index]
                attended = operators.attend(attention, index, layer, normed, ropes[self.ropes[index]], rows)
                x, normed = operators.finish_layer(layer, x[rows], attended)
                ropes = {rope: (cos[rows], sin[rows]) for rope, (cos, sin) in ropes.items()}
            index = stop
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | HeadScores:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] (may be a transposed view), or what computes parts."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return self.operators.head(head, hidden, self.config.final_logit_softcap)
