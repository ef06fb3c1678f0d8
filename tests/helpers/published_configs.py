"""A config.json with a few fields, as lamella reads it and as transformers does."""

from __future__ import annotations

from typing import Any

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields


def parsed(architecture: str, **fields: Any) -> ModelConfig:
    """architecture: such as "Llama"."""
    return parse_config(TypedFields({"architectures": [f"{architecture}ForCausalLM"], **fields}, "config.json"))


def theirs(architecture: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, f"{architecture}Config")(**fields)


def biases(config: ModelConfig) -> set[tuple[bool, bool, bool]]:
    """Whether Q, K and V, the output of attention, and the MLP have biases, in any layer."""
    return {
        (layer.attention.has_qkv_bias, layer.attention.has_output_bias, layer.mlp.has_bias) for layer in config.layers
    }
