"""Mixtral text models (arXiv 2401.04088): Llama's shape, experts in every layer, and a sliding window where the config
has one. Their GGUF files say "llama"."""

from __future__ import annotations

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, count_of, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_json, shape_from_json
from lamella.model_executor.models.mistral import MISTRAL_DEFAULTS
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's MixtralConfig fills in.
_DEFAULTS = {**MISTRAL_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_NUM_EXPERTS, _TOP_K = 8, 2


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    shape = shape_from_json(text, _DEFAULTS)
    router = RouterConfig(scoring="softmax", top_k=text.integer("num_experts_per_tok", _TOP_K), is_renormalised=True)
    num_experts = count_of(text, _NUM_EXPERTS, "num_local_experts", "num_experts")
    experts = checked_experts(text, num_experts, MLPConfig(shape.mlp_width, shape.activation), router)
    # transformers masks 0 <= q - k < sliding_window: the query itself is counted already.
    layers = (shape.layer(text.optional_integer("sliding_window")),) * shape.num_layers
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "mixtral", shape, with_experts(layers, experts, lambda layer: True)
    )


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel", "mixtral"),
    config_from_json=config_from_json,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER | {"block_sparse_moe.gate": "mlp.router"},
        experts_name="block_sparse_moe.experts",
        expert_layer={"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    ),
)
