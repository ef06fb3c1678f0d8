"""EXAONE 4 text models (arXiv 2507.11407): norms only after each part, norms of heads; where layers slide, full ones do
not know positions."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import BEHIND, ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    SLIDING,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.weight_map import (
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    GGUF_POST_NORMS,
    HEAD_NORMS,
    POST_NORMS,
    SAFETENSORS_LAYER,
    WeightMap,
)

# What transformers 5.24's Exaone4Config fills in.
_DEFAULTS = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_WINDOW, _FULL_EVERY = 4096, 4


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """A window that is null makes every layer full, and then all of them know positions."""
    shape = shape_from_json(text, _DEFAULTS, qk_norm="heads", norms=BEHIND)
    window = text.optional_integer("sliding_window") if "sliding_window" in text else _WINDOW
    period = 1 if window is None or text.fields.has_value("layer_types") else _period(text)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % period == 0)
    window_of_sliding(text, kinds, _WINDOW)
    full = shape.layer() if window is None else shape.layer(rotary=None)
    layers = tuple(shape.layer(window) if kind == SLIDING else full for kind in kinds)
    return model_from_json(text, _DEFAULTS, end_token_ids, "exaone4", shape, layers)


def _period(text: ConfigJson) -> int:
    if isinstance(text.fields.raw("sliding_window_pattern"), str):
        raise text.refuse("sliding_window_pattern", "transformers takes a number here; write layer_types instead")
    return text.integer("sliding_window_pattern", _FULL_EVERY)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    shape = shape_from_gguf(config, tensor_names, qk_norm="heads", norms=BEHIND)
    layers = (shape.layer(),) * shape.num_layers
    if config.has("attention.sliding_window"):
        window, full = config.integer("attention.sliding_window"), shape.layer(rotary=None)
        slides = config.sliding_pattern(shape.num_layers, _FULL_EVERY)
        layers = tuple(shape.layer(window) if each else full for each in slides)
    return model_from_gguf(config, "exaone4", shape, layers, tensor_names)


EXAONE4 = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM", "Exaone4Model", "exaone4"),
    gguf_architecture="exaone4",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=SAFETENSORS_LAYER | HEAD_NORMS | POST_NORMS,
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | GGUF_POST_NORMS,
    ),
)
