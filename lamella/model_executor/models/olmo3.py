"""OLMo 2 and OLMo 3 text models (arXiv 2501.00656): norms only after each part, and of all heads of Q and of K as one
row. OLMo 3 slides in three of four layers, and scales the rotary embedding of the others alone."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import BEHIND, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    FULL,
    SLIDING,
    head_size,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
    with_default,
)
from lamella.model_executor.models.rope_json import rotaries_with_old_keys
from lamella.model_executor.models.sharding import ROW_NORM_SHARDING
from lamella.model_executor.models.weight_map import (
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    GGUF_POST_NORMS,
    HEAD_NORMS,
    POST_NORMS,
    SAFETENSORS_LAYER,
    WeightMap,
)

# What transformers 5.24's Olmo2Config and Olmo3Config fill in.
_DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279,
}  # fmt: skip
_WINDOW, _FULL_EVERY = 4096, 4
_THETAS_OF_3 = {FULL: 500_000.0, SLIDING: 500_000.0}


def config_of_2_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, qk_norm="projection", norms=BEHIND)
    return model_from_json(text, _DEFAULTS, end_token_ids, "olmo2", shape, (shape.layer(),) * shape.num_layers)


def config_of_3_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """The old keys, `rope_scaling` and `rope_theta`, are about full layers only, as in transformers."""
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    rotaries = rotaries_with_old_keys(
        text, head_size(text, _DEFAULTS), _THETAS_OF_3, {FULL: "rope_theta"}, max_positions=max_positions
    )
    shape = shape_from_json(
        text, _DEFAULTS, rotary=rotaries[FULL], attention_bias=True, qk_norm="projection", norms=BEHIND
    )
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % _FULL_EVERY == 0)
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW), rotaries)
    return model_from_json(text, _DEFAULTS, end_token_ids, "olmo3", shape, layers)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Both write the same architecture. A window stands for OLMo 3, whose sliding layers are not scaled."""
    shape = shape_from_gguf(config, tensor_names, qk_norm="projection", norms=BEHIND)
    layers = (shape.layer(),) * shape.num_layers
    if config.has("attention.sliding_window"):
        window = config.integer("attention.sliding_window")
        slides = config.sliding_pattern(shape.num_layers, _FULL_EVERY)
        plain = RotaryConfig(shape.rotary.dim, shape.rotary.theta)
        layers = tuple(shape.layer(window, rotary=plain) if each else shape.layer() for each in slides)
    return model_from_gguf(
        config, "olmo3" if config.has("attention.sliding_window") else "olmo2", shape, layers, tensor_names
    )


_WEIGHTS = WeightMap(
    safetensors_layer=SAFETENSORS_LAYER | HEAD_NORMS | POST_NORMS,
    gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | GGUF_POST_NORMS,
    sharding=ROW_NORM_SHARDING,
)
OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model", "olmo2"),
    gguf_architecture="olmo2",
    config_from_json=config_of_2_from_json,
    config_from_gguf=config_from_gguf,
    weights=_WEIGHTS,
)
OLMO3 = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model", "olmo3"),
    config_from_json=config_of_3_from_json,
    weights=_WEIGHTS,
)
