"""Code World Model (arXiv 2510.02387): Llama's shape with windows in three of four layers, and Llama 3's scaling."""

from __future__ import annotations

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import layer_kinds, model_from_json, shape_from_json, window_of_sliding
from lamella.model_executor.models.rope_json import flat_parameters
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's CwmConfig fills in.
_DEFAULTS = {
    "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "bos_token_id": 128000, "eos_token_id": (128001, 128008, 128009),
}  # fmt: skip
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_WINDOW, _FULL_EVERY = 8192, 4


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """End tokens that are null are the default ones, too."""
    fields = text.fields
    filled = {}
    if not list(flat_parameters(text)):
        filled["rope_parameters"] = _ROPE
    if end_token_ids is None and not fields.has_value("eos_token_id"):
        end_token_ids = _DEFAULTS["eos_token_id"]  # type: ignore[assignment]
    text = ConfigJson(fields.overlaid(TypedFields(filled, fields.place, fields.prefix)))
    shape = shape_from_json(text, _DEFAULTS, mlp_bias=text.boolean("mlp_bias", False))
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % _FULL_EVERY == 0)
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW))
    return model_from_json(text, _DEFAULTS, end_token_ids, "cwm", shape, layers)


CWM = Family(
    name="cwm",
    architectures=("CwmForCausalLM", "CwmModel", "cwm"),
    config_from_json=config_from_json,
    weights=WeightMap(),
)
