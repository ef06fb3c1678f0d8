"""Granite text models (3.x dense): Llama's shape with multipliers of embeddings, scores, branches and logits; and
Granite with windows, whose heads have sinks and whose layers have rotary embeddings of their own, or none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import LayerConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    Defaults,
    LlamaShape,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, WeightMap

# What transformers 5.24's GraniteConfig and GraniteSWAConfig fill in.
_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEFAULTS_WITH_WINDOWS = {
    "vocab_size": 100352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "tie_word_embeddings": True,
}
_WINDOW, _FULL_EVERY = 128, 4


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = granite_shape(text, _DEFAULTS)
    layers = (shape.layer(),) * shape.num_layers
    return granite_model(text, _DEFAULTS, end_token_ids, "granite", shape, layers)


def config_with_windows_from_json(
    config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    defaults = _DEFAULTS_WITH_WINDOWS
    shape = granite_shape(text, defaults)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % _FULL_EVERY == 0)
    window = window_of_sliding(text, kinds, _WINDOW)
    layers = tuple(
        shape.layer(
            window if kind == "sliding_attention" else None,
            rotary=replace(shape.rotary, theta=theta) if theta else None,
            has_sinks=True,
        )
        for kind, theta in zip(kinds, _thetas(text, shape), strict=True)
    )
    return granite_model(text, defaults, end_token_ids, "granite_swa", shape, layers)


def _thetas(text: ConfigJson, shape: LlamaShape) -> tuple[float, ...]:
    """Each layer's; 0: it does not know positions."""
    if not text.fields.has_value("layer_rope_theta"):
        return (shape.rotary.theta,) * shape.num_layers
    thetas = text.fields.numbers("layer_rope_theta")
    above, high = ranges.ROPE_THETA
    if len(thetas) != shape.num_layers or not all(theta == 0 or above < theta <= high for theta in thetas):
        raise text.refuse("layer_rope_theta", f"must be {shape.num_layers} numbers, each 0 or up to {high:g}")
    return thetas


def granite_shape(text: ConfigJson, defaults: Defaults) -> LlamaShape:
    return shape_from_json(
        text,
        defaults,
        attention_bias=True,
        mlp_bias=text.boolean("mlp_bias", False),
        scale=text.number("attention_multiplier", 1.0),
    )


def granite_model(
    text: ConfigJson,
    defaults: Defaults,
    end_token_ids: tuple[int, ...] | None,
    name: str,
    shape: LlamaShape,
    layers: tuple[LayerConfig, ...],
) -> ModelConfig:
    eps = text.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6))
    fields = _multiplied(
        text.number("embedding_multiplier", 1.0),
        text.number("residual_multiplier", 1.0),
        text.number("logits_scaling", 1.0),
        eps,
    )
    return model_from_json(text, defaults, end_token_ids, name, shape, layers, **fields)


def _multiplied(embedding: float, residual: float, logits_divisor: float, eps: float) -> dict[str, Any]:
    """The stream divided by the branches' multiplier, see ModelConfig."""
    return {
        "embedding_scale": embedding / residual,
        "norm_eps": eps / residual**2,
        "logits_scale": 1.0 / logits_divisor,
    }


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    shape, rotary = granite_shape_from_gguf(config, tensor_names)
    layers = (shape.layer(rotary=rotary),) * shape.num_layers
    return model_from_gguf(config, "granite", shape, layers, tensor_names, **multipliers_from_gguf(config))


def granite_shape_from_gguf(
    config: ConfigGguf, tensor_names: Collection[str]
) -> tuple[LlamaShape, RotaryConfig | None]:
    """The shape, and the layers' embedding: None where the file says that there is none, which for these architectures
    it does with `rope.scaling.finetuned`."""
    shape = shape_from_gguf(config, tensor_names)
    rotary = shape.rotary if config.boolean("rope.scaling.finetuned", True) else None
    return shape.with_scale(config.number_or_off("attention.scale") or shape.head_dim**-0.5), rotary


def multipliers_from_gguf(config: ConfigGguf) -> dict[str, Any]:
    """Fields of ModelConfig."""
    return _multiplied(
        config.number_or_off("embedding_scale") or 1.0,
        config.number_or_off("residual_scale") or 1.0,
        config.number_or_off("logit_scale") or 1.0,
        config.number("attention.layer_norm_rms_epsilon"),
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM", "GraniteModel", "granite"),
    gguf_architecture="granite",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(gguf_pairs=True),
)
GRANITE_SWA = Family(
    name="granite_swa",
    architectures=("GraniteSWAForCausalLM", "GraniteSWAModel", "granite_swa"),
    config_from_json=config_with_windows_from_json,
    weights=WeightMap(safetensors_layer={**SAFETENSORS_LAYER, "self_attn.sinks": "self_attn.sinks"}),
)
