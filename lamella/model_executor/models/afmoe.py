"""AFMoE text models (Arcee's Trinity): norms around both parts, attention's output gated element by element, no rotary
embedding in full layers, and experts beside a shared one."""

from __future__ import annotations

from lamella.model_executor.models.config import AROUND, GateConfig, ModelConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    SLIDING,
    layer_kinds,
    model_from_json,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import HEAD_NORMS, WeightMap

# What transformers 5.24's AfmoeConfig fills in.
_DEFAULTS = {
    "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
    "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _EXPERT_WIDTH, _NUM_SHARED, _NUM_DENSE = 64, 6, 1408, 2, 1
_WINDOW, _FULL_EVERY, _FLOOR = 1024, 4, 1e-20


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`route_norm` of older files changes nothing in transformers: weights are always renormalised."""
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, qk_norm="heads", norms=AROUND)
    every = text.integer("global_attn_every_n_layers", _FULL_EVERY)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % every == 0)
    window = window_of_sliding(text, kinds, _WINDOW)
    gate = GateConfig("sigmoid", is_per_head=False)
    layers = [
        shape.layer(window, gate=gate) if kind == SLIDING else shape.layer(gate=gate, rotary=None) for kind in kinds
    ]
    width = text.integer("moe_intermediate_size", _EXPERT_WIDTH)
    router = RouterConfig(
        scoring="sigmoid",
        top_k=text.integer("num_experts_per_tok", _TOP_K),
        has_correction=True,
        is_renormalised=True,
        renormalised_floor=_FLOOR,
        scale=text.number("route_scale", 1.0),
    )
    shared = MLPConfig(width * text.integer("num_shared_experts", _NUM_SHARED), shape.activation)
    expert = MLPConfig(width, shape.activation)
    experts = checked_experts(text, text.integer("num_experts", _NUM_EXPERTS), expert, router, shared)
    num_dense = text.integer("num_dense_layers", _NUM_DENSE)
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "afmoe",
        shape,
        with_experts(layers, experts, lambda layer: layer >= num_dense),
        embedding_scale=shape.hidden_size**0.5 if text.boolean("mup_enabled", False) else 1.0,
    )


AFMOE = Family(
    name="afmoe",
    architectures=("AfmoeForCausalLM", "AfmoeModel", "afmoe"),
    config_from_json=config_from_json,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER
        | HEAD_NORMS
        | {
            "self_attn.gate_proj": "self_attn.gate_proj",
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "mlp_norm",
            "post_mlp_layernorm": "post_mlp_norm",
            "mlp.router.gate": "mlp.router",
            "mlp.expert_bias": "mlp.router.correction",
        },
    ),
)
