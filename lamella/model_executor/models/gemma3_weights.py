"""Gemma 3's tensors: their names in safetensors and GGUF files, their shapes, and what a text model leaves out."""

from __future__ import annotations

import re

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.weights.checkpoint import WeightNames

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Of a multimodal checkpoint, below an optional "model.".
_OTHER_PARTS = {"vision_tower.": "the vision tower", "multi_modal_projector.": "the multimodal projector"}
_ROTARY_BUFFER = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\w*\.\w*inv_freq")

_GGUF_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, as the model asks for them, without building it."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer_shapes = {
        "self_attn.qkv_proj": (query_rows + 2 * kv_rows, hidden),
        "self_attn.o_proj": (hidden, query_rows),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_up_proj": (2 * config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (config.vocab_size, hidden)}


def _from_safetensors(name: str) -> str:
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _from_gguf(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _GGUF_LAYER_NAMES:
        return f"layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name


def _left_out(name: str) -> str | None:
    inner = name.removeprefix("model.")
    for prefix, family in _OTHER_PARTS.items():
        if inner.startswith(prefix):
            return family
    # Tables that the configuration gives; transformers has not stored them for years, and does not read them either.
    return "rotary frequencies" if _ROTARY_BUFFER.fullmatch(_from_safetensors(name)) else None


GEMMA3_WEIGHTS = WeightNames(
    from_safetensors=_from_safetensors,
    from_gguf=_from_gguf,
    left_out=_left_out,
    safetensors_norm_offset=1.0,  # the model multiplies by 1 + w
    gguf_norm_offset=0.0,  # its converter has added the 1 already
)
