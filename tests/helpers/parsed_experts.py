"""What configs with experts make of their fields."""

from __future__ import annotations

from typing import Any

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.mlp_config import ExpertsConfig


def sparse_layers(config: ModelConfig) -> list[int]:
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, ExpertsConfig)]


def experts_of(config: ModelConfig) -> ExpertsConfig:
    """Those of the last layer that has some."""
    experts = config.layers[sparse_layers(config)[-1]].mlp
    assert isinstance(experts, ExpertsConfig)
    return experts


def sizes_of(config: ModelConfig) -> tuple[int, int, int]:
    """(experts, experts a token takes, their width)."""
    experts = experts_of(config)
    return experts.num_experts, experts.router.top_k, experts.expert.width


def dense_widths(config: ModelConfig) -> set[Any]:
    return {layer.mlp.width for layer in config.layers if not isinstance(layer.mlp, ExpertsConfig)}
