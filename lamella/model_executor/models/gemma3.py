"""Gemma 3 text models (arXiv 2503.19786): five sliding-window layers to each full one, head norms, four norms a layer,
tied embeddings. What config.json and GGUF metadata leave out, what is not built, and how its tensors are named."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlaces,
    RotaryConfig,
)
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson, read_rope
from lamella.model_executor.models.family import Family, checked
from lamella.model_executor.models.weight_map import GGUF_LAYER, SAFETENSORS_LAYER, WeightMap

logger = logging.getLogger(__name__)

_KINDS = ("full_attention", "sliding_attention")
_ROPE_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_FULL_EVERY = 6
_LAYERS_OF_27B = 62
_NORMS = NormPlaces(input=True, post_attention=True, mlp=True, post_mlp=True)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """config: the whole file; text: the part that describes the text model, which is the same in text-only files.

    Fields that are left out are what transformers 5.24's Gemma3TextConfig fills in. end_token_ids: those of
    generation_config.json, which win; None: it has none.
    Raises ModelLoadError for a variant that is not built.
    """
    _refuse_variants(text)
    vocab_size = text.integer("vocab_size", 262208)
    hidden_size, num_heads = text.integer("hidden_size", 2304), text.integer("num_attention_heads", 8)
    if hidden_size % num_heads:
        raise text.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    if text.optional_number("attn_logit_softcapping") is not None:
        logger.warning("attn_logit_softcapping is left out: transformers does not apply it to Gemma 3 either")
    bos_token_id, eos_token_ids = _special_tokens(config, text)
    shape = _Shape(
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads", 4),
        head_dim=text.integer("head_dim", 256),
        query_scale=text.number("query_pre_attn_scalar", 256) ** -0.5,
        mlp_width=text.integer("intermediate_size", 9216),
    )
    return checked(
        ModelConfig(
            architecture="gemma3",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            norm_eps=text.number("rms_norm_eps", 1e-6),
            max_position_embeddings=text.integer("max_position_embeddings", 131072),
            layers=_layers(text, shape),
            # transformers reads this from the whole config only, even where the text part says something else.
            tie_word_embeddings=config.boolean("tie_word_embeddings", True),
            embedding_scale=hidden_size**0.5,
            final_logit_softcap=text.optional_number("final_logit_softcapping"),
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids if end_token_ids is None else end_token_ids,
            dtype=text.dtype() or config.dtype() or "float32",
        ),
        config.fields.place,
    )


def _refuse_variants(text: ConfigJson) -> None:
    if text.optional_boolean("use_bidirectional_attention"):
        raise text.refuse(
            "use_bidirectional_attention",
            "this is an encoder, and only causal models can generate; use the model it was made from",
        )
    if text.boolean("attention_bias", False):
        raise text.refuse("attention_bias", "Gemma 3 layers are built without biases")
    if text.optional_integer("num_kv_shared_layers"):
        raise text.refuse(
            "num_kv_shared_layers",
            "Gemma 3 is built with K and V in every layer; use a checkpoint in which each layer has its own",
        )
    if text.string("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise text.refuse("hidden_activation", "it is not built; Gemma 3 uses gelu_pytorch_tanh")
    if text.fields.has_value("per_layer_config") and len(list(text.fields.optional_object("per_layer_config"))) > 0:
        raise text.refuse("per_layer_config", "Gemma 3 is built with layers of one shape; leave it out")


def _special_tokens(config: ConfigJson, text: ConfigJson) -> tuple[int | None, tuple[int, ...]]:
    """Token that begins a text and tokens that end one: of the whole config where it states them, else of its text
    part. null means none."""
    place = next((each for each in (config, text) if "bos_token_id" in each), None)
    bos_token_id = 2 if place is None else place.optional_integer("bos_token_id")
    place = next((each for each in (config, text) if each.fields.has_value("eos_token_id")), text)
    return bos_token_id, place.token_ids("eos_token_id") if "eos_token_id" in place else (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What all layers have alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float
    mlp_width: int

    def layer(self, kind: str, window_tokens: int | None, rope_theta: float, rope_divisor: float = 1.0) -> LayerConfig:
        attention = AttentionConfig(
            kind=kind,
            window_tokens=window_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            scale=self.query_scale,
            rotary=RotaryConfig(self.head_dim, rope_theta, rope_divisor),
            qk_norm="heads",
        )
        return LayerConfig(attention, MLPConfig(self.mlp_width, "gelu_tanh"), _NORMS)


def _layers(text: ConfigJson, shape: _Shape) -> tuple[LayerConfig, ...]:
    num_layers = text.integer("num_hidden_layers", 26)
    kinds = text.layer_types(num_layers, _KINDS)
    if kinds is None:
        period = text.integer("sliding_window_pattern", _FULL_EVERY)
        if text.integer("_sliding_window_pattern", period) != period:
            raise text.refuse("_sliding_window_pattern", "transformers reads sliding_window_pattern; write that")
        kinds = tuple(_KINDS[(layer + 1) % period != 0] for layer in range(num_layers))
    ropes = {kind: _rope(text, kind) for kind in _KINDS}
    # transformers masks 0 <= q - k < sliding_window for Gemma 3: the query itself is counted already.
    windows: dict[str, int | None] = {"full_attention": None}
    if "sliding_attention" in kinds:
        windows["sliding_attention"] = text.integer("sliding_window", 4096)
    layer_of = {kind: shape.layer(kind, windows[kind], *ropes[kind]) for kind in windows}
    return tuple(layer_of[kind] for kind in kinds)


def _rope(text: ConfigJson, kind: str) -> tuple[float, float]:
    """(theta, position divisor) of the layers of `kind`. The old scaling keys are about full layers only. Where both
    are given they win over the new ones, as in transformers."""
    nested = ConfigJson(text.fields.optional_object("rope_parameters"))
    others = sorted(set(nested.fields) - set(_KINDS))
    if others:
        raise text.refuse(
            "rope_parameters",
            "rope_parameters must be given per layer type for Gemma 3, as {'full_attention': {...}, ...}",
        )
    parameters = nested.fields.optional_object(kind)
    if kind == "full_attention" and text.fields.has_value("rope_scaling"):
        parameters = parameters.overlaid(text.fields.object("rope_scaling"))
    rope = read_rope(ConfigJson(parameters))
    # It is read even where it is not used, so that a value out of range is always refused.
    old_theta = text.number("rope_theta" if kind == "full_attention" else "rope_local_base_freq", _ROPE_THETA[kind])
    return rope.theta or old_theta, rope.factor


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Raises ModelLoadError: metadata that is missing or unusable, or a variant that is not built."""
    num_layers = config.integer("block_count")
    hidden_size, num_heads = config.integer("embedding_length"), config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        if config.integer(key, head_dim) != head_dim:
            raise config.refuse(key, f"Gemma 3 is built with heads of one length, all of it rotated: {head_dim}")
    # GGUF does not store query_pre_attn_scalar. It is head_dim, except hidden_size / num_heads in the 27B model
    # (google/gemma-3-27b: 168 with head_dim 128).
    query_scalar = hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim
    shape = _Shape(
        num_heads=num_heads,
        num_kv_heads=config.integer("attention.head_count_kv"),
        head_dim=head_dim,
        query_scale=query_scalar**-0.5,
        mlp_width=config.integer("feed_forward_length"),
    )
    return checked(
        ModelConfig(
            architecture="gemma3",
            vocab_size=config.vocab_size(),
            hidden_size=hidden_size,
            norm_eps=config.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=config.integer("context_length"),
            layers=_gguf_layers(config, num_layers, shape),
            tie_word_embeddings="output.weight" not in tensor_names,
            embedding_scale=hidden_size**0.5,
            # llama.cpp, whose format this is, applies no cap to the attention of Gemma 3 and takes 0 as "no cap".
            final_logit_softcap=config.number_or_off("final_logit_softcapping"),
            bos_token_id=config.bos_token_id(),
            eos_token_ids=config.end_token_ids(),
            dtype=config.dtype(),
        ),
        config.place,
    )


def _gguf_layers(config: ConfigGguf, num_layers: int, shape: _Shape) -> tuple[LayerConfig, ...]:
    # llama.cpp scales the full layers of Gemma 3 alone.
    local_theta = config.number("rope.freq_base_swa", _ROPE_THETA["sliding_attention"])
    sliding = shape.layer("sliding_attention", config.integer("attention.sliding_window"), local_theta)
    full = shape.layer("full_attention", None, config.number("rope.freq_base"), config.rope_factor())
    slides = config.sliding_pattern(num_layers, _FULL_EVERY)  # few files state it
    return tuple(sliding if each else full for each in slides)


_HEAD_NORMS = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel", "gemma3_text"),
    multimodal_architectures=("Gemma3ForConditionalGeneration", "gemma3"),
    gguf_architecture="gemma3",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer={
            **SAFETENSORS_LAYER,
            **_HEAD_NORMS,
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "post_mlp_norm",
        },
        gguf_layer={
            **GGUF_LAYER,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_norm",
            "post_ffw_norm": "post_mlp_norm",
        },
        prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        other_parts={"vision_tower.": "the vision tower", "multi_modal_projector.": "the multimodal projector"},
        safetensors_norm_offset=1.0,  # the model multiplies by 1 + w
        gguf_divisors=False,
        gguf_norm_offset=0.0,  # its converter has added the 1 already
    ),
)
