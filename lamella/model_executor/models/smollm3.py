"""SmolLM3 text models: Llama's shape in which every fourth layer does not know positions; a window, where there is one,
is of those layers."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's SmolLM3Config fills in.
_DEFAULTS = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2_000_000.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True,
}  # fmt: skip
_NO_ROPE_EVERY = 4


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, mlp_bias=text.boolean("mlp_bias", False))
    turns = _rotated_layers(text, shape.num_layers)
    window = text.optional_integer("sliding_window") if text.boolean("use_sliding_window", False) else None
    kinds = layer_kinds(text, shape.num_layers, lambda layer: window is None or turns[layer])
    window = window_of_sliding(text, kinds, None)
    layers = tuple(
        shape.layer(window if kind == "sliding_attention" else None, rotary=shape.rotary if turned else None)
        for kind, turned in zip(kinds, turns, strict=True)
    )
    return model_from_json(text, _DEFAULTS, end_token_ids, "smollm3", shape, layers)


def _rotated_layers(text: ConfigJson, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer embeds positions, which is what a 1 in `no_rope_layers` says."""
    if not text.fields.has_value("no_rope_layers"):
        period = text.integer("no_rope_layer_interval", _NO_ROPE_EVERY)
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    flags = text.fields.integers("no_rope_layers", high=1)
    if len(flags) < num_layers:
        raise text.refuse("no_rope_layers", f"must have an entry for each of the {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format states neither which layers embed positions nor a window: llama.cpp leaves out every fourth."""
    shape = shape_from_gguf(config, tensor_names)
    layers = tuple(
        shape.layer(rotary=shape.rotary if (layer + 1) % _NO_ROPE_EVERY else None) for layer in range(shape.num_layers)
    )
    return model_from_gguf(config, "smollm3", shape, layers, tensor_names)


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model", "smollm3"),
    gguf_architecture="smollm3",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(gguf_pairs=True),
)
