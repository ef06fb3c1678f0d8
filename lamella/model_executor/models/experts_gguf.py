"""What GGUF metadata says of experts, whatever the family."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import LayerConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.experts_json import with_experts
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig

_SCORING = {1: "softmax", 2: "sigmoid"}  # llama.cpp's numbers of them


def experts_from_gguf(
    config: ConfigGguf, router: RouterConfig, *, activation: str = "silu", shared_has_gate: bool = False
) -> ExpertsConfig:
    """router: as the family has it, but for top_k, groups and scale, which the file states. Where experts' width is
    left out it is the dense layers'; a shared one's is theirs as many times as there are shared ones.

    Raises ModelLoadError for keys that are missing or unusable, or of another router than the family's.
    """
    num_experts, top_k = config.integer("expert_count"), config.integer("expert_used_count")
    key = "expert_feed_forward_length"
    width = config.integer(key if config.has(key) else "feed_forward_length")
    shared = None
    if config.has("expert_shared_feed_forward_length"):
        shared = MLPConfig(config.integer("expert_shared_feed_forward_length"), activation)
    elif config.has("expert_shared_count"):
        shared = MLPConfig(width * config.integer("expert_shared_count"), activation)
    _refuse_other_router(config, router)
    return ExpertsConfig(
        num_experts=num_experts,
        expert=MLPConfig(width, activation),
        router=_with_stated(config, router, num_experts, top_k),
        shared=shared,
        shared_has_gate=shared is not None and shared_has_gate,
    )


def _with_stated(config: ConfigGguf, router: RouterConfig, num_experts: int, top_k: int) -> RouterConfig:
    num_groups, num_chosen = config.integer("expert_group_count", 1), config.integer("expert_group_used_count", 1)
    size, rest = divmod(num_experts, num_groups)
    if rest or (num_groups > 1 and size < 2):
        raise config.refuse(
            "expert_group_count", f"{num_experts} experts cannot be divided into groups of 2 or more so"
        )
    if num_chosen > num_groups:
        raise config.refuse("expert_group_used_count", f"there are {num_groups} groups; it can be that at most")
    if top_k > size * num_chosen:
        raise config.refuse("expert_used_count", f"there are {size * num_chosen} experts; it can be that at most")
    scale = config.number_or_off("expert_weights_scale") or 1.0
    return replace(router, top_k=top_k, num_groups=num_groups, num_chosen_groups=num_chosen, scale=scale)


def _refuse_other_router(config: ConfigGguf, router: RouterConfig) -> None:
    scoring = config.choice("expert_gating_func", _SCORING)
    if scoring not in (None, router.scoring):
        raise config.refuse("expert_gating_func", f"the router of this architecture is built with {router.scoring}")
    is_renormalised = router.is_renormalised
    if config.boolean("expert_weights_norm", is_renormalised) != is_renormalised:
        raise config.refuse("expert_weights_norm", f"it is built for this architecture as {is_renormalised}")


def has_experts(config: ConfigGguf) -> bool:
    """Files of models without experts leave the number out, or say 0."""
    return config.has("expert_count") and config.number_or_off("expert_count") is not None


def with_stored_experts(
    config: ConfigGguf, layers: Collection[LayerConfig], experts: ExpertsConfig, tensor_names: Collection[str]
) -> tuple[LayerConfig, ...]:
    """Layers whose router the file holds get experts in place of their MLP.

    Raises ModelLoadError where that contradicts the number of layers before the first of them, if it is stated.
    """
    sparse = [layer for layer in range(len(layers)) if f"blk.{layer}.ffn_gate_inp.weight" in tensor_names]
    config.integer("moe_every_n_layers", 1)  # the tensors say it, too
    first = sparse[0] if sparse else len(layers)
    if config.integer("leading_dense_block_count", first) != first:
        raise config.refuse("leading_dense_block_count", f"the first layer with a router is {first}; it must be that")
    return with_experts(layers, experts, sparse.__contains__)
