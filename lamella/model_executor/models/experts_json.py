"""What configs with experts have in common: how many there are, which layers have them, and their tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import LayerConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, shared_mlp

KINDS = ("dense", "sparse")

# Names that most families with experts use, beside those of dense layers.
EXPERTS_LAYER = SAFETENSORS_LAYER | {
    "mlp.gate": "mlp.router",
    "mlp.gate.e_score_correction_bias": "mlp.router.correction",
    **shared_mlp("mlp.shared_expert"),
    **shared_mlp("mlp.shared_experts"),
    "mlp.shared_expert_gate": "mlp.shared_gate",
}


def count_of(config: ConfigJson, default: int, *keys: str) -> int:
    """The first of the fields `keys` that is there; transformers reads some numbers under several names."""
    found = next((key for key in keys if config.fields.has_value(key)), None)
    return default if found is None else config.integer(found)


def checked_experts(
    config: ConfigJson, num_experts: int, expert: MLPConfig, router: RouterConfig, shared: MLPConfig | None = None
) -> ExpertsConfig:
    """Raises ModelLoadError where no token could get as many experts as the router gives it."""
    size, rest = divmod(num_experts, router.num_groups)
    if rest or (router.num_groups > 1 and size < 2):
        raise config.refuse(
            "n_group", f"{num_experts} experts cannot be divided into so many groups of 2 or more; a divisor would do"
        )
    if router.num_chosen_groups > router.num_groups:
        raise config.refuse(
            "topk_group", f"there are {router.num_groups} groups to choose from; it can be that at most"
        )
    most = size * router.num_chosen_groups
    if router.top_k > most:
        raise ModelLoadError(
            f"{config.fields.place}: {config.fields.prefix}num_experts_per_tok={router.top_k}, and a token can choose "
            f"from {most} experts; it can be that at most"
        )
    return ExpertsConfig(num_experts=num_experts, expert=expert, router=router, shared=shared)


def with_experts(
    layers: Collection[LayerConfig], experts: ExpertsConfig, is_sparse: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """The layers that is_sparse names get experts in place of their MLP."""
    return tuple(replace(layer, mlp=experts) if is_sparse(index) else layer for index, layer in enumerate(layers))


def sparse_kinds(config: ConfigJson, num_layers: int, num_dense: int) -> tuple[bool, ...]:
    """Whether each layer has experts, by `mlp_layer_types`; where that is left out all but the first num_dense."""
    if not config.fields.has_value("mlp_layer_types"):
        return tuple(layer >= num_dense for layer in range(num_layers))
    kinds = config.fields.strings("mlp_layer_types")
    if len(kinds) != num_layers or set(kinds) - set(KINDS):
        raise config.fields.error("mlp_layer_types", f"a list of {num_layers} names, each of them dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)
