"""Granite text models (3.x dense): Llama's shape with multipliers of embeddings, scores, branches and logits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lamella.model_executor.models.config import LayerConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    Defaults,
    LlamaShape,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
)
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's GraniteConfig fills in.
_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = granite_shape(text, _DEFAULTS)
    layers = (shape.layer(),) * shape.num_layers
    return granite_model(text, _DEFAULTS, end_token_ids, "granite", shape, layers)


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
