"""AFMoE text models (Arcee's Trinity): norms around both parts, attention's output gated element by element, no rotary
embedding in full layers, and experts beside a shared one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import AROUND, GateConfig, ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    SLIDING,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import GGUF_HEAD_NORMS, GGUF_LAYER, GGUF_POST_NORMS, HEAD_NORMS, WeightMap

# What transformers 5.24's AfmoeConfig fills in.
_DEFAULTS = {
    "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
    "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _EXPERT_WIDTH, _NUM_SHARED, _NUM_DENSE = 64, 6, 1408, 2, 1
_WINDOW, _FULL_EVERY, _FLOOR = 1024, 4, 1e-20
_GATE = GateConfig("sigmoid", is_per_head=False)
_ROUTER = RouterConfig(scoring="sigmoid", top_k=1, has_correction=True, is_renormalised=True, renormalised_floor=_FLOOR)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`route_norm` of older files changes nothing in transformers: weights are always renormalised."""
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, qk_norm="heads", norms=AROUND)
    every = text.integer("global_attn_every_n_layers", _FULL_EVERY)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % every == 0)
    window = window_of_sliding(text, kinds, _WINDOW)
    layers = [
        shape.layer(window, gate=_GATE) if kind == SLIDING else shape.layer(gate=_GATE, rotary=None) for kind in kinds
    ]
    width = text.integer("moe_intermediate_size", _EXPERT_WIDTH)
    top_k, scale = text.integer("num_experts_per_tok", _TOP_K), text.number("route_scale", 1.0)
    router = replace(_ROUTER, top_k=top_k, scale=scale)
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


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format does not state the scale of embeddings; llama.cpp has that of `mup_enabled`, as the published models
    do."""
    shape = shape_from_gguf(config, tensor_names, qk_norm="heads", norms=AROUND)
    window = config.integer("attention.sliding_window")
    slides = config.sliding_pattern(shape.num_layers, _FULL_EVERY)
    layers = [
        shape.layer(window, gate=_GATE) if is_sliding else shape.layer(gate=_GATE, rotary=None) for is_sliding in slides
    ]
    experts = experts_from_gguf(config, _ROUTER)
    return model_from_gguf(
        config,
        "afmoe",
        shape,
        with_stored_experts(config, layers, experts, tensor_names),
        tensor_names,
        embedding_scale=shape.hidden_size**0.5,
    )


AFMOE = Family(
    name="afmoe",
    architectures=("AfmoeForCausalLM", "AfmoeModel", "afmoe"),
    gguf_architecture="afmoe",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
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
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | GGUF_POST_NORMS | {"attn_gate": "self_attn.gate_proj"},
    ),
)
