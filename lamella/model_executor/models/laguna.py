"""Laguna text models (Poolside): attention's output gated by a softplus, heads and rotary embedding that differ by
layer, and experts beside a shared one."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import GateConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, sparse_kinds, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    FULL,
    SLIDING,
    head_size,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
    with_default,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import rotaries_by_kind
from lamella.model_executor.models.weight_map import GGUF_HEAD_NORMS, GGUF_LAYER, HEAD_NORMS, WeightMap

# What transformers 5.24's LagunaConfig fills in.
_DEFAULTS = {
    "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _WIDTH, _WINDOW = 256, 8, 512, 512
_GGUF_FULL_EVERY = 4  # which llama.cpp assumes of files with windows, from the first layer on
# Of each kind of layer: theta, and the part of a head that turns.
_ROTARY = {FULL: (500_000.0, 0.5), SLIDING: (10_000.0, 1.0)}


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    num_layers, head_dim = with_default(text, _DEFAULTS, "num_hidden_layers"), head_size(text, _DEFAULTS)
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    kinds = layer_kinds(text, num_layers, lambda layer: True)
    defaults = {kind: RotaryConfig(int(head_dim * part), theta) for kind, (theta, part) in _ROTARY.items()}
    rotaries = rotaries_by_kind(text, kinds, head_dim, defaults, max_positions=max_positions)
    shape = shape_from_json(text, _DEFAULTS, rotary=rotaries[FULL], attention_bias=True, qk_norm="heads")
    heads = (shape.num_heads,) * num_layers
    if text.fields.has_value("num_attention_heads_per_layer"):
        heads = text.fields.integers("num_attention_heads_per_layer", low=1, high=ranges.HEADS.high)
        if len(heads) != num_layers:
            raise text.fields.error("num_attention_heads_per_layer", f"a list of {num_layers} numbers")
    window = window_of_sliding(text, kinds, _WINDOW)
    # A word, or true for "per-head"; whatever else there is stands for a gate of each element.
    gate = GateConfig("softplus", is_per_head=text.fields.raw("gating") in (True, "per-head") or "gating" not in text)
    layers = [
        shape.layer(window if kind == SLIDING else None, num_heads=num_heads, rotary=rotaries[kind], gate=gate)
        for kind, num_heads in zip(kinds, heads, strict=True)
    ]
    if text.boolean("moe_apply_router_weight_on_input", False):
        raise text.refuse("moe_apply_router_weight_on_input", "transformers does not run it either")
    router = RouterConfig(
        scoring="sigmoid",
        top_k=text.integer("num_experts_per_tok", _TOP_K),
        logit_cap=text.fields.number("moe_router_logit_softcapping", 0.0) or None,
        has_correction=True,
        is_renormalised=True,
        scale=text.number("moe_routed_scaling_factor", 1.0),
    )
    expert = MLPConfig(text.integer("moe_intermediate_size", _WIDTH), shape.activation)
    shared = MLPConfig(text.integer("shared_expert_intermediate_size", _WIDTH), shape.activation)
    experts = checked_experts(text, text.integer("num_experts", _NUM_EXPERTS), expert, router, shared)
    layers_with_experts = with_experts(layers, experts, sparse_kinds(text, num_layers, num_dense=1).__getitem__)
    return model_from_json(text, _DEFAULTS, end_token_ids, "laguna", shape, layers_with_experts)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Whether a gate is of heads or of elements is told by its rows. Sliding layers' embedding is not scaled."""
    num_layers = config.num_layers()
    heads = config.integers("attention.head_count", num_layers)
    shape = shape_from_gguf(config, tensor_names, has_partial=True, num_heads=heads[0], qk_norm="heads")
    rotary, window = {False: shape.rotary}, config.window()
    slides: tuple[bool, ...] = (False,) * num_layers
    if window is not None:
        slides = config.sliding_pattern(num_layers, _GGUF_FULL_EVERY, is_first_full=True)
        dim = config.integer("rope.dimension_count_swa", shape.head_dim)
        rotary[True] = config.sliding_rotary(dim, shape.rotary.theta)
    layers = []
    for layer, (num_heads, is_sliding) in enumerate(zip(heads, slides, strict=True)):
        gate_rows = config.shape_of(f"blk.{layer}.attn_gate.weight")[0]
        gate = GateConfig("softplus", is_per_head=gate_rows == num_heads)
        layers.append(
            shape.layer(window if is_sliding else None, num_heads=num_heads, rotary=rotary[is_sliding], gate=gate)
        )
    router = RouterConfig(
        scoring="sigmoid",
        top_k=1,
        logit_cap=config.number_or_off("router_logit_softcapping"),
        has_correction=True,
        is_renormalised=True,
    )
    experts = experts_from_gguf(config, router)
    layers_with_experts = with_stored_experts(config, layers, experts, tensor_names)
    return model_from_gguf(config, "laguna", shape, layers_with_experts, tensor_names)


LAGUNA = Family(
    name="laguna",
    architectures=("LagunaForCausalLM", "LagunaModel", "laguna"),
    gguf_architecture="laguna",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER
        | HEAD_NORMS
        | {
            "self_attn.g_proj": "self_attn.gate_proj",
            "mlp.experts.e_score_correction_bias": "mlp.router.correction",
        },
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | {"attn_gate": "self_attn.gate_proj"},
    ),
)
