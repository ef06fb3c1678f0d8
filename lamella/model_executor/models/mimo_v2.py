"""MiMo-V2-Flash text models (arXiv 2601.02780): short windows with sinks, twice as many KV heads in sliding layers,
rotary embedding of a third of a head, values narrower than keys, and experts from the second layer on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import ModelConfig, PairDivisors, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import (
    EXPERTS_LAYER,
    checked_experts,
    count_of,
    sparse_kinds,
    with_experts,
)
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
    with_default,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import rotaries_by_kind
from lamella.model_executor.models.weight_map import GGUF_LAYER, WeightMap

# What transformers 5.24's MiMoV2FlashConfig fills in.
_DEFAULTS = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "bos_token_id": 1,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _EXPERT_WIDTH, _V_DIM, _WINDOW, _VALUE_SCALE = 256, 8, 2048, 128, 129, 0.707
_FULL_EVERY = 6
_THETA = {FULL: 5_000_000.0, SLIDING: 10_000.0}
_PARTIAL = 0.334
_FLOOR = 1e-20  # of the sum that weights are divided by
_ROUTER = RouterConfig(scoring="sigmoid", top_k=1, has_correction=True, is_renormalised=True, renormalised_floor=_FLOOR)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """transformers 5.24 knows only its own names for what differs between layer kinds, as here."""
    num_layers = with_default(text, _DEFAULTS, "num_hidden_layers")
    kinds = layer_kinds(text, num_layers, lambda layer: layer == 0 or (layer + 1) % _FULL_EVERY == 0)
    head_dim, max_positions = head_size(text, _DEFAULTS), with_default(text, _DEFAULTS, "max_position_embeddings")
    defaults = {kind: RotaryConfig(int(head_dim * _PARTIAL), theta) for kind, theta in _THETA.items()}
    rotaries = rotaries_by_kind(text, kinds, head_dim, defaults, max_positions=max_positions)
    rotaries = {kind: _in_pairs(rotary, head_dim) for kind, rotary in rotaries.items()}
    shape = shape_from_json(text, _DEFAULTS, rotary=rotaries[FULL], qkv_bias=text.boolean("attention_bias", False))
    window = text.integer("sliding_window", _WINDOW)
    # This one counts the keys before the query.
    before = text.optional_integer("sliding_window_size")
    window = window if before is None else before + 1
    value_scale = text.optional_number("attention_value_scale")
    if "attention_value_scale" not in text:
        value_scale = _VALUE_SCALE
    layers = [
        shape.layer(
            window if kind == SLIDING else None,
            num_kv_heads=shape.num_kv_heads * (2 if kind == SLIDING else 1),
            v_dim=text.integer("v_head_dim", _V_DIM),
            rotary=rotaries[kind],
            value_scale=1.0 if value_scale is None else value_scale,
            has_sinks=kind == SLIDING,
        )
        for kind in kinds
    ]
    router = replace(
        _ROUTER,
        top_k=text.integer("num_experts_per_tok", _TOP_K),
        num_groups=text.integer("n_group", 1),
        num_chosen_groups=text.integer("topk_group", 1),
        is_renormalised=text.boolean("norm_topk_prob", True),
        scale=text.optional_number("routed_scaling_factor") or 1.0,
    )
    num_experts = count_of(text, _NUM_EXPERTS, "n_routed_experts", "num_local_experts")
    expert = MLPConfig(text.integer("moe_intermediate_size", _EXPERT_WIDTH), shape.activation)
    sparse = sparse_kinds(text, num_layers, num_dense=1)
    experts = checked_experts(text, num_experts, expert, router)
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "mimo_v2_flash", shape, with_experts(layers, experts, sparse.__getitem__)
    )


def _in_pairs(rotary: RotaryConfig, head_dim: int) -> RotaryConfig:
    """A third of a head may be an odd number of elements. transformers then turns one more, the pairs' frequencies
    being those of the odd number."""
    if rotary.dim % 2 == 0 or rotary.dim == head_dim or rotary.scaling is not None:
        return rotary
    dim = rotary.dim + 1
    exponents = (2 * pair * (1 / rotary.dim - 1 / dim) for pair in range(dim // 2))
    return replace(rotary, dim=dim, scaling=PairDivisors(tuple(rotary.theta**each for each in exponents)))


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The converter stores the published `sliding_window`, to which transformers' class adds the query. Which layers
    have sinks is told by the tensors."""
    num_layers = config.num_layers()
    num_stored = num_layers + config.num_extra_layers()  # lists of layers have the extra ones', too
    kv_heads = config.integers("attention.head_count_kv", num_stored)
    shape = shape_from_gguf(config, tensor_names, has_partial=True, has_own_v_dim=True, num_kv_heads=kv_heads[0])
    v_dim, window = config.integer("attention.value_length", shape.head_dim), config.integer("attention.sliding_window")
    slides = config.sliding_pattern(num_stored, _FULL_EVERY)
    sliding_rotary = config.sliding_rotary(shape.rotary.dim, _THETA[SLIDING])
    value_scale = _gguf_value_scale(config)
    layers = [
        shape.layer(
            window + 1 if slides[layer] else None,
            num_kv_heads=kv_heads[layer],
            v_dim=v_dim,
            rotary=sliding_rotary if slides[layer] else shape.rotary,
            value_scale=value_scale,
            has_sinks=f"blk.{layer}.attn_sinks.weight" in tensor_names,
        )
        for layer in range(num_layers)
    ]
    experts = experts_from_gguf(config, _ROUTER)
    return model_from_gguf(
        config, "mimo_v2_flash", shape, with_stored_experts(config, layers, experts, tensor_names), tensor_names
    )


def _gguf_value_scale(config: ConfigGguf) -> float:
    """The first converter left it out, together with the layers for multi-token prediction; then it is the published
    model's. A later one leaves it out where there is none."""
    return config.number("attention.value_scale", 1.0 if config.num_extra_layers() else _VALUE_SCALE)


MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2FlashModel", "mimo_v2_flash"),
    gguf_architecture="mimo2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER | {"self_attn.attention_sink_bias": "self_attn.sinks"},
        gguf_layer=GGUF_LAYER | {"attn_sinks.weight": "self_attn.sinks", "attn_qkv": "self_attn.qkv_proj"},
        other_parts={"mtp.": "multi-token prediction"},
    ),
)
