"""Granite text models with experts (3.x A400M, A800M): Granite's multipliers, experts in every layer, and in some
models a shared one beside them."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, has_experts, with_stored_experts
from lamella.model_executor.models.experts_json import checked_experts, count_of, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.granite import (
    granite_model,
    granite_shape,
    granite_shape_from_gguf,
    multipliers_from_gguf,
)
from lamella.model_executor.models.llama_shape import model_from_gguf
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, WeightMap
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's GraniteMoeConfig and GraniteMoeSharedConfig fill in.
_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K = 8, 2


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`intermediate_size` is the experts' width."""
    shape = granite_shape(text, _DEFAULTS)
    expert = MLPConfig(shape.mlp_width, shape.activation)
    # The softmax of the chosen logits is the one of all of them, renormalised.
    router = RouterConfig(scoring="softmax", top_k=text.integer("num_experts_per_tok", _TOP_K), is_renormalised=True)
    shared_width = text.integer("shared_intermediate_size", 0)
    shared = MLPConfig(shared_width, shape.activation) if shared_width else None
    num_experts = count_of(text, _NUM_EXPERTS, "num_local_experts")
    experts = checked_experts(text, num_experts, expert, router, shared)
    layers = with_experts((shape.layer(),) * shape.num_layers, experts, lambda layer: True)
    return granite_model(text, _DEFAULTS, end_token_ids, "granite_moe", shape, layers)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Granite 4's models without recurrent layers come as this architecture, too, and some of them have no experts."""
    shape, rotary = granite_shape_from_gguf(config, tensor_names)
    layers = (shape.layer(rotary=rotary),) * shape.num_layers
    if has_experts(config):
        experts = experts_from_gguf(config, RouterConfig(scoring="softmax", top_k=1, is_renormalised=True))
        layers = with_stored_experts(config, layers, experts, tensor_names)
    return model_from_gguf(config, "granite_moe", shape, layers, tensor_names, **multipliers_from_gguf(config))


_GATE_UP, _DOWN = ExpertStack(("gate_proj", "up_proj")), ExpertStack(("down_proj",))
GRANITE_MOE = Family(
    name="granite_moe",
    architectures=(
        "GraniteMoeForCausalLM",
        "GraniteMoeModel",
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedModel",
        "granitemoeshared",
    ),
    gguf_architecture="granitemoe",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=SAFETENSORS_LAYER
        | {
            "block_sparse_moe.router.layer": "mlp.router",
            "block_sparse_moe.router": "mlp.router",
            "shared_mlp.input_linear": "mlp.shared.gate_up_proj",
            "shared_mlp.output_linear": "mlp.shared.down_proj",
        },
        safetensors_stacks={
            "block_sparse_moe.input_linear.weight": _GATE_UP,
            "block_sparse_moe.output_linear.weight": _DOWN,
            "block_sparse_moe.experts.gate_up_proj": _GATE_UP,
            "block_sparse_moe.experts.down_proj": _DOWN,
        },
        gguf_pairs=True,
    ),
)
