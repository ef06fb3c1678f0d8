"""Ministral (8B, 2410): Mistral's layers, each with a window or without; and Ministral 3: one window for all, if any, a
stretched rotary embedding, and queries that grow with their positions."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig, QueryScaleConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    head_size,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
    with_default,
)
from lamella.model_executor.models.mistral import MISTRAL3_WRAPPER, MISTRAL_DEFAULTS, MISTRAL_WEIGHTS
from lamella.model_executor.models.rope_json import flat_parameters, flat_rotary
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import WeightMap, paired

# What transformers 5.24's Ministral3Config fills in; its MinistralConfig has Mistral's.
_DEFAULTS_OF_3 = {
    **MISTRAL_DEFAULTS, "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
_WINDOW = 4096
_ROPE_OF_3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_ITS_ROPE_KEYS = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """A window that is left out is 4,096, one that is null none."""
    shape = shape_from_json(text, MISTRAL_DEFAULTS)
    window = text.optional_integer("sliding_window") if "sliding_window" in text else _WINDOW
    kinds = layer_kinds(text, shape.num_layers, lambda layer: window is None)
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW))
    return model_from_json(text, MISTRAL_DEFAULTS, end_token_ids, "ministral", shape, layers)


def config_of_3_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """layer_types mean nothing to it: its one window is every layer's."""
    defaults = _DEFAULTS_OF_3
    if not list(flat_parameters(text)):
        text = ConfigJson(text.fields.overlaid(TypedFields({"rope_parameters": _ROPE_OF_3}, text.fields.place)))
    max_positions = with_default(text, defaults, "max_position_embeddings")
    rotary = flat_rotary(text, head_size(text, defaults), max_positions=max_positions, known=_ITS_ROPE_KEYS)
    shape = shape_from_json(text, defaults, rotary=rotary)
    rope = ConfigJson(flat_parameters(text))
    period = text.optional_integer("original_max_position_embeddings")
    if period is None:
        is_set_by_kind = rotary.scaling is not None and "original_max_position_embeddings" not in rope
        period = max_positions if is_set_by_kind else rope.integer("original_max_position_embeddings")
    scale = QueryScaleConfig(rope.number("llama_4_scaling_beta"), period)
    layer = shape.layer(text.optional_integer("sliding_window"), query_scale=scale)
    return model_from_json(
        text, defaults, end_token_ids, "ministral3", shape, (layer,) * shape.num_layers, whole=config
    )


def config_of_3_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    shape = shape_from_gguf(config, tensor_names)
    scale = QueryScaleConfig(
        config.number("attention.temperature_scale"), config.integer("rope.scaling.original_context_length")
    )
    return model_from_gguf(
        config, "ministral3", shape, (shape.layer(query_scale=scale),) * shape.num_layers, tensor_names
    )


MINISTRAL = Family(
    name="ministral",
    architectures=("MinistralForCausalLM", "MinistralModel", "ministral"),
    config_from_json=config_from_json,
    weights=WeightMap(),
)
MINISTRAL3 = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM", "Ministral3Model", "ministral3"),
    multimodal_architectures=MISTRAL3_WRAPPER,
    gguf_architecture="mistral3",
    config_from_json=config_of_3_from_json,
    config_from_gguf=config_of_3_from_gguf,
    weights=paired(MISTRAL_WEIGHTS),
)
