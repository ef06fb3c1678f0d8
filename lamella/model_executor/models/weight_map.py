"""How a family's checkpoints name the tensors of a model, and which values they store differently from the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lamella.model_executor.models.sharding import SHARDING, ShardRule
from lamella.model_executor.weights.stacked import ExpertStack

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
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b.bias": "mlp.router.correction",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "ffn_gate_shexp": "mlp.shared.gate_proj",
    "ffn_up_shexp": "mlp.shared.up_proj",
    "ffn_down_shexp": "mlp.shared.down_proj",
}
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
EXPERT_LAYER = {each: each for each in MLP_PARTS}
# As transformers' own modules have them, which can be saved as they are.
SAFETENSORS_STACKS = {
    "mlp.experts.gate_up_proj": ExpertStack(("gate_proj", "up_proj")),
    "mlp.experts.down_proj": ExpertStack(("down_proj",)),
}
_GGUF_STACKED = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
GGUF_STACKS = {
    f"{name}.{ending}": ExpertStack(parts, ending=ending)
    for name, parts in _GGUF_STACKED.items()
    for ending in ("weight", "bias")
}
# Of layers with norms after each part, and with norms before and after each, as Gemma's files call them.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
FOUR_NORMS = {**POST_NORMS, "pre_feedforward_layernorm": "mlp_norm"}
GGUF_POST_NORMS = {"post_attention_norm": "post_attention_norm", "post_ffw_norm": "post_mlp_norm"}
# Norms of Q and K, of the layers that have them.
HEAD_NORMS = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
GGUF_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# What stands before the names of a text model's tensors in multimodal checkpoints, and before those of other parts.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
TOWERS = {
    "vision_tower.": "the vision tower",
    "vision_model.": "the vision tower",
    "multi_modal_projector.": "the multimodal projector",
    "vit_large_projector.": "the vision projector",
    "embed_vision.": "the vision projector",
}
GGUF_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# What stands before the names of tensors that belong to a file's towers, which are usually files of their own (mmproj).
GGUF_OTHER_PARTS = {
    "v.": "the vision tower",
    "a.": "the audio tower",
    "mm.a.": "the audio projector",
    "mm.": "the vision projector",
    "resampler.": "the vision projector",
}
_GGUF_MODEL = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
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
    *_stacks: of a layer's tensor that holds all of its experts, what it is called -> how it holds them. expert_layer:
    of an expert with tensors of its own, what these are called -> what the model calls them; experts_name: what stands
    before the expert's number.
    sharding: of each of the model's own names, without layer, expert, ".weight" and ".bias", how it is divided among
    workers.
    """

    safetensors_layer: Mapping[str, str] = field(default_factory=lambda: SAFETENSORS_LAYER)
    gguf_layer: Mapping[str, str] = field(default_factory=lambda: GGUF_LAYER)
    prefixes: tuple[str, ...] = ("model.",)
    other_parts: Mapping[str, str] = field(default_factory=dict)
    safetensors_stacks: Mapping[str, ExpertStack] = field(default_factory=lambda: SAFETENSORS_STACKS)
    gguf_stacks: Mapping[str, ExpertStack] = field(default_factory=lambda: GGUF_STACKS)
    experts_name: str = "mlp.experts"
    expert_layer: Mapping[str, str] = field(default_factory=lambda: EXPERT_LAYER)
    safetensors_norm_offset: float = 0.0
    gguf_norm_offset: float = 0.0
    safetensors_pairs: bool = False
    gguf_pairs: bool = False
    gguf_divisors: bool = True
    sharding: Mapping[str, ShardRule] = field(default_factory=lambda: SHARDING)

    def from_safetensors(self, name: str) -> str:
        """A stored name -> the model's. A name that the family does not know comes back as it is, so that the error for
        a tensor without a place can name it."""
        inner = self._without_prefix(name)
        layer = re.fullmatch(r"(layers\.\d+\.)(.+)(\.\w+)", inner)
        if layer and layer[2] + layer[3] in self.safetensors_layer:
            return layer[1] + self.safetensors_layer[layer[2] + layer[3]]
        if layer and layer[2] in self.safetensors_layer:
            return layer[1] + self.safetensors_layer[layer[2]] + layer[3]
        expert = re.fullmatch(re.escape(self.experts_name) + r"\.(\d+)\.(\w+)", layer[2]) if layer else None
        if layer and expert and expert[2] in self.expert_layer:
            return f"{layer[1]}mlp.experts.{expert[1]}.{self.expert_layer[expert[2]]}{layer[3]}"
        return inner

    def safetensors_stack(self, name: str) -> tuple[str, ExpertStack] | None:
        """(what the model calls the layer's experts, how they are held) of a stored tensor that holds them all."""
        layer = re.fullmatch(r"(layers\.\d+\.)(.+)", self._without_prefix(name))
        if layer and layer[2] in self.safetensors_stacks:
            return f"{layer[1]}mlp.experts", self.safetensors_stacks[layer[2]]
        return None

    def gguf_stack(self, name: str) -> tuple[str, ExpertStack] | None:
        """As `safetensors_stack`."""
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if layer and layer[2] in self.gguf_stacks:
            return f"layers.{layer[1]}.mlp.experts", self.gguf_stacks[layer[2]]
        return None

    def _without_prefix(self, name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in self.prefixes if name.startswith(prefix)), name)

    def from_gguf(self, name: str) -> str:
        """As `from_safetensors`."""
        stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer and f"{layer[2]}.{suffix}" in self.gguf_layer:
            return f"layers.{layer[1]}.{self.gguf_layer[f'{layer[2]}.{suffix}']}"
        if layer and layer[2] in self.gguf_layer:
            return f"layers.{layer[1]}.{self.gguf_layer[layer[2]]}.{suffix}"
        return f"{_GGUF_MODEL[stem]}.{suffix}" if stem in _GGUF_MODEL else name

    def left_out(self, name: str) -> str | None:
        """What a tensor belongs to that the model deliberately leaves out; None: it does not leave the tensor out."""
        inner = name.removeprefix("model.")
        for prefix, part in self.other_parts.items():
            if inner.startswith(prefix):
                return part
        return "rotary frequencies" if _ROTARY_BUFFER.fullmatch(self.from_safetensors(name)) else None

    def gguf_left_out(self, name: str) -> str | None:
        """As `left_out`."""
        if self.gguf_divisors and name in GGUF_DIVISORS:
            return "rotary divisors, which the configuration has"
        return next((part for prefix, part in GGUF_OTHER_PARTS.items() if name.startswith(prefix)), None)


def shared_mlp(stored_name: str) -> dict[str, str]:
    """The layers of an MLP that is shared beside experts: what files say -> what the model says."""
    return {f"{stored_name}.{each}": f"mlp.shared.{each}" for each in MLP_PARTS}


def paired(weights: WeightMap) -> WeightMap:
    """The same, of an architecture whose rows of Q and K llama.cpp's converter puts in pairs."""
    return replace(weights, gguf_pairs=True)
