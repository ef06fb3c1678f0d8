"""How a family's checkpoints name the tensors of a model, and which values they store differently from the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Of a layer, as most families have them: what files say -> what the model says, each without ".weight" or ".bias".
SAFETENSORS_LAYER = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
}
GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_norm",
    "ffn_norm": "mlp_norm",
}
# Norms of Q and K, of the layers that have them.
HEAD_NORMS = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
GGUF_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GGUF_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_GGUF_MODEL = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
# Tables that the configuration gives; transformers has not stored them for years, and does not read them either.
_ROTARY_BUFFER = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\w*\.\w*inv_freq")


@dataclass(frozen=True, slots=True)
class WeightMap:
    """prefixes: what may stand before a model's own names in safetensors, longer ones first.
    other_parts: prefixes of tensors in multimodal checkpoints that a text model does not need, below an optional
    "model." -> what they belong to.
    *_norm_offset: what turns a stored norm weight into the multiplier that the model applies.
    *_pairs: whether files hold the rows of Q and K in pairs of a head's two halves (row 2i + s is row i of half s). So
    does whatever turns neighbours against each other: some models everywhere, and llama.cpp's converter makes it so for
    some whose own files have halves.
    gguf_divisors: whether the configuration takes divisors of rotary frequencies from tensors of the file.
    *_layer: of a tensor without ".weight" or ".bias", the whole name that the model gives it.
    """

    safetensors_layer: Mapping[str, str] = field(default_factory=lambda: SAFETENSORS_LAYER)
    gguf_layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    prefixes: tuple[str, ...] = ("model.",)
    other_parts: Mapping[str, str] = field(default_factory=dict)
    safetensors_norm_offset: float = 0.0
    gguf_norm_offset: float = 0.0
    safetensors_pairs: bool = False
    gguf_pairs: bool = False
    gguf_divisors: bool = True

    def from_safetensors(self, name: str) -> str:
        """A stored name -> the model's. A name that the family does not know comes back as it is, so that the error for
        a tensor without a place can name it."""
        inner = next((name.removeprefix(prefix) for prefix in self.prefixes if name.startswith(prefix)), name)
        layer = re.fullmatch(r"(layers\.\d+\.)(.+)(\.\w+)", inner)
        if layer and layer[2] + layer[3] in self.safetensors_layer:
            return layer[1] + self.safetensors_layer[layer[2] + layer[3]]
        if layer and layer[2] in self.safetensors_layer:
            return layer[1] + self.safetensors_layer[layer[2]] + layer[3]
        return inner

    def from_gguf(self, name: str) -> str:
        """As `from_safetensors`."""
        stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer and layer[2] in self.gguf_layer:
            return f"layers.{layer[1]}.{self.gguf_layer[layer[2]]}.{suffix}"
        return f"{_GGUF_MODEL[stem]}.{suffix}" if stem in _GGUF_MODEL else name

    def left_out(self, name: str) -> str | None:
        """What a tensor belongs to that the model deliberately leaves out; None: it does not leave the tensor out."""
        inner = name.removeprefix("model.")
        for prefix, part in self.other_parts.items():
            if inner.startswith(prefix):
                return part
        if self.gguf_divisors and name in GGUF_DIVISORS:
            return "rotary divisors, which the configuration has"
        return "rotary frequencies" if _ROTARY_BUFFER.fullmatch(self.from_safetensors(name)) else None


def paired(weights: WeightMap) -> WeightMap:
    """The same, of an architecture whose rows of Q and K llama.cpp's converter puts in pairs."""
    return replace(weights, gguf_pairs=True)
