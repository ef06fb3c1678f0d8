"""Granite text models with windows: Granite's layers and multipliers, heads that have sinks, and layers with rotary
embeddings of their own, or none."""

from __future__ import annotations

from dataclasses import replace

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.granite import granite_model, granite_shape
from lamella.model_executor.models.llama_shape import SLIDING, LlamaShape, layer_kinds, window_of_sliding
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, WeightMap

# What transformers 5.24's GraniteSWAConfig fills in.
_DEFAULTS = {
    "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "bos_token_id": 100257, "eos_token_id": 100257, "tie_word_embeddings": True,
}  # fmt: skip
_WINDOW, _FULL_EVERY = 128, 4


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = granite_shape(text, _DEFAULTS)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % _FULL_EVERY == 0)
    window = window_of_sliding(text, kinds, _WINDOW)
    layers = tuple(
        shape.layer(
            window if kind == SLIDING else None,
            rotary=replace(shape.rotary, theta=theta) if theta else None,
            has_sinks=True,
        )
        for kind, theta in zip(kinds, _thetas(text, shape), strict=True)
    )
    return granite_model(text, _DEFAULTS, end_token_ids, "granite_swa", shape, layers)


def _thetas(text: ConfigJson, shape: LlamaShape) -> tuple[float, ...]:
    """Each layer's; 0: it does not know positions."""
    if not text.fields.has_value("layer_rope_theta"):
        return (shape.rotary.theta,) * shape.num_layers
    thetas = text.fields.numbers("layer_rope_theta")
    above, high = ranges.ROPE_THETA
    if len(thetas) != shape.num_layers or not all(theta == 0 or above < theta <= high for theta in thetas):
        raise text.refuse("layer_rope_theta", f"must be {shape.num_layers} numbers, each 0 or up to {high:g}")
    return thetas


GRANITE_SWA = Family(
    name="granite_swa",
    architectures=("GraniteSWAForCausalLM", "GraniteSWAModel", "granite_swa"),
    config_from_json=config_from_json,
    weights=WeightMap(safetensors_layer={**SAFETENSORS_LAYER, "self_attn.sinks": "self_attn.sinks"}),
)
