"""What GGUF metadata says of experts, whatever the family."""

from __future__ import annotations

from dataclasses import replace

from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig


def experts_from_gguf(
    config: ConfigGguf, router: RouterConfig, *, activation: str = "silu", shared_has_gate: bool = False
) -> ExpertsConfig:
    """router: as the family has it, but for top_k, which the file states. Where experts' width is left out it is the
    dense layers'. Raises ModelLoadError for keys that are missing or unusable."""
    num_experts, top_k = config.integer("expert_count"), config.integer("expert_used_count")
    if top_k > num_experts:
        raise config.refuse("expert_used_count", f"there are {num_experts} experts; it can be that at most")
    width = config.integer("expert_feed_forward_length", config.integer("feed_forward_length"))
    shared = None
    if config.has("expert_shared_feed_forward_length"):
        shared = MLPConfig(config.integer("expert_shared_feed_forward_length"), activation)
    return ExpertsConfig(
        num_experts=num_experts,
        expert=MLPConfig(width, activation),
        router=replace(router, top_k=top_k),
        shared=shared,
        shared_has_gate=shared is not None and shared_has_gate,
    )


def has_experts(config: ConfigGguf) -> bool:
    """Files of models without experts leave the number out, or say 0."""
    return config.has("expert_count") and config.number_or_off("expert_count") is not None
