"""Qwen2 and Qwen2.5 text models (arXiv 2407.10671, 2412.15115): Llama's shape with biases on Q, K and V; where a config
asks for it, the layers from `max_window_layers` on slide."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_gguf, model_from_json, shape_from_gguf, shape_from_json
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's Qwen2Config fills in.
_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_KINDS = ("full_attention", "sliding_attention")


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS, qkv_bias=True)
    layers = tuple(shape.layer(window) for window in windows(text, shape.num_layers))
    return model_from_json(text, _DEFAULTS, end_token_ids, "qwen2", shape, layers)


def windows(text: ConfigJson, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; None: it has none."""
    kinds, window = _kinds(text, num_layers), _window(text)
    if "sliding_attention" in kinds and window is None:
        raise text.refuse("layer_types", "there are sliding layers, but use_sliding_window is off; switch it on")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(text: ConfigJson) -> int | None:
    """transformers masks 0 <= q - k < sliding_window: the query itself is counted already."""
    if not text.boolean("use_sliding_window", False):
        return None
    return text.optional_integer("sliding_window") if "sliding_window" in text else _WINDOW


def _kinds(text: ConfigJson, num_layers: int) -> tuple[str, ...]:
    kinds = text.layer_types(num_layers, _KINDS)
    if kinds is not None:
        return kinds
    first = text.integer("max_window_layers", _MAX_WINDOW_LAYERS) if _window(text) is not None else num_layers
    return tuple(_KINDS[layer >= first] for layer in range(num_layers))


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format states no windows for this architecture. Raises ModelLoadError: metadata that is missing or unusable,
    or a variant that is not built."""
    shape = shape_from_gguf(config, tensor_names)
    return model_from_gguf(config, "qwen2", shape, (shape.layer(),) * shape.num_layers, tensor_names)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model", "qwen2"),
    gguf_architecture="qwen2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(),
)
