"""Qwen3 text models (arXiv 2505.09388): Qwen2's layers and windows with norms of heads in place of biases."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_gguf, model_from_json, shape_from_gguf, shape_from_json
from lamella.model_executor.models.qwen2 import windows
from lamella.model_executor.models.weight_map import (
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    HEAD_NORMS,
    SAFETENSORS_LAYER,
    WeightMap,
)

# What transformers 5.24's Qwen3Config fills in.
_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
}  # fmt: skip


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, qk_norm="heads")
    layers = tuple(shape.layer(window) for window in windows(text, shape.num_layers))
    return model_from_json(text, _DEFAULTS, end_token_ids, "qwen3", shape, layers)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format states no windows for this architecture."""
    shape = shape_from_gguf(config, tensor_names, qk_norm="heads")
    return model_from_gguf(config, "qwen3", shape, (shape.layer(),) * shape.num_layers, tensor_names)


QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model", "qwen3"),
    gguf_architecture="qwen3",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer={**SAFETENSORS_LAYER, **HEAD_NORMS}, gguf_layer={**GGUF_LAYER, **GGUF_HEAD_NORMS}
    ),
)
