"""Gemma 3 text models (arXiv 2503.19786): five sliding-window layers to each full one, head norms, four norms a layer,
tied embeddings."""

from __future__ import annotations

import logging
from collections.abc import Collection

from lamella.model_executor.models.config import AROUND, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import IS_ENCODER, ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    FULL,
    SLIDING,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
    with_default,
)
from lamella.model_executor.models.rope_json import rotaries_with_old_keys
from lamella.model_executor.models.weight_map import (
    FOUR_NORMS,
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    GGUF_POST_NORMS,
    HEAD_NORMS,
    SAFETENSORS_LAYER,
    TEXT_PREFIXES,
    TOWERS,
    WeightMap,
)

logger = logging.getLogger(__name__)

_WINDOW, _FULL_EVERY, _QUERY_SCALAR, _HEAD_DIM, _LAYERS_OF_27B = 4096, 6, 256, 256, 62
# What transformers 5.24's Gemma3TextConfig fills in.
_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": _HEAD_DIM, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_OLD_THETA_KEYS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    _refuse_variants(text)
    if text.optional_number("attn_logit_softcapping") is not None:
        logger.warning("attn_logit_softcapping is left out: transformers does not apply it to Gemma 3 either")
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    head_dim = text.integer("head_dim", _HEAD_DIM)  # transformers fails where it is null
    rotaries = rotaries_with_old_keys(text, head_dim, _THETAS, _OLD_THETA_KEYS, max_positions=max_positions)
    shape = shape_from_json(
        text,
        _DEFAULTS,
        rotary=rotaries[FULL],
        activation_key="hidden_activation",
        attention_bias=True,
        qk_norm="heads",
        norms=AROUND,
        scale=text.number("query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
    )
    if shape.hidden_size % shape.num_heads:
        raise text.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {shape.num_heads}")
    period = text.integer("sliding_window_pattern", _FULL_EVERY)
    if text.integer("_sliding_window_pattern", period) != period:
        raise text.refuse("_sliding_window_pattern", "transformers reads sliding_window_pattern; write that")
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % period == 0)
    # transformers masks 0 <= q - k < sliding_window for Gemma 3: the query itself is counted already.
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW), rotaries)
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "gemma3",
        shape,
        layers,
        whole=config,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=text.optional_number("final_logit_softcapping"),
    )


def _refuse_variants(text: ConfigJson) -> None:
    if text.optional_boolean("use_bidirectional_attention"):
        raise text.refuse("use_bidirectional_attention", IS_ENCODER)
    if text.optional_integer("num_kv_shared_layers"):
        raise text.not_built(
            "num_kv_shared_layers",
            "Gemma 3 is built with K and V in every layer; use a checkpoint in which each layer has its own",
        )
    if list(text.fields.optional_object("per_layer_config")):
        raise text.not_built("per_layer_config", "Gemma 3 is built with layers of one shape; leave it out")


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """GGUF does not store query_pre_attn_scalar: it is head_dim, except hidden_size / num_heads in the 27B model
    (google/gemma-3-27b: 168 with head_dim 128). llama.cpp scales the full layers alone, and caps no scores."""
    shape = shape_from_gguf(
        config,
        tensor_names,
        rotary=lambda dim: RotaryConfig(dim, config.number("rope.freq_base"), config.rope_factor()),
        activation="gelu_tanh",
        qk_norm="heads",
        norms=AROUND,
    )
    if shape.num_layers == _LAYERS_OF_27B:
        shape = shape.with_scale((shape.hidden_size / shape.num_heads) ** -0.5)
    local = RotaryConfig(shape.head_dim, config.number("rope.freq_base_swa", _THETAS[SLIDING]))
    sliding, full = shape.layer(config.integer("attention.sliding_window"), rotary=local), shape.layer()
    slides = config.sliding_pattern(shape.num_layers, _FULL_EVERY)  # few files state it
    return model_from_gguf(
        config,
        "gemma3",
        shape,
        tuple(sliding if each else full for each in slides),
        tensor_names,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=config.number_or_off("final_logit_softcapping"),
    )


GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel", "gemma3_text"),
    multimodal_architectures=("Gemma3ForConditionalGeneration", "gemma3"),
    gguf_architecture="gemma3",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=SAFETENSORS_LAYER | HEAD_NORMS | FOUR_NORMS,
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | GGUF_POST_NORMS,
        prefixes=TEXT_PREFIXES,
        other_parts=TOWERS,
        safetensors_norm_offset=1.0,  # the model multiplies by 1 + w; GGUF's converter has added the 1 already
        gguf_divisors=False,
    ),
)
