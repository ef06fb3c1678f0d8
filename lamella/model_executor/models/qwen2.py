"""Qwen2 and Qwen2.5 text models (arXiv 2407.10671, 2412.15115): Llama's shape with biases on Q, K and V; where a config
asks for it, the layers from `max_window_layers` on slide."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
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
)
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's Qwen2Config fills in.
_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS, qkv_bias=True)
    layers = tuple(shape.layer(window) for window in windows(text, shape.num_layers))
    return model_from_json(text, _DEFAULTS, end_token_ids, "qwen2", shape, layers)


def windows(text: ConfigJson, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; None: it has none."""
    window = window_of_switched(text)
    first = text.integer("max_window_layers", _MAX_WINDOW_LAYERS) if window is not None else num_layers
    kinds = layer_kinds(text, num_layers, lambda layer: layer < first)
    refuse_without_window(text, kinds, window)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def refuse_without_window(text: ConfigJson, kinds: Collection[str], window: int | None) -> None:
    if SLIDING in kinds and window is None:
        raise text.refuse("layer_types", "there are sliding layers, but use_sliding_window is off; switch it on")


def window_of_switched(text: ConfigJson) -> int | None:
    """The window where the config switches windows on. transformers masks 0 <= q - k < sliding_window: the query itself
    is counted already."""
    if not text.boolean("use_sliding_window", False):
        return None
    return text.optional_integer("sliding_window") if "sliding_window" in text else _WINDOW


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
