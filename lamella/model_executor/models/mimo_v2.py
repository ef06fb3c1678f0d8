"""MiMo-V2-Flash text models (arXiv 2601.02780): short windows with sinks, twice as many KV heads in sliding layers,
rotary embedding of a third of a head, values narrower than keys, and experts from the second layer on."""

from __future__ import annotations

from lamella.model_executor.models.config import ModelConfig, RotaryConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_json import (
    EXPERTS_LAYER,
    checked_experts,
    count_of,
    sparse_kinds,
    with_experts,
)
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    head_size,
    layer_kinds,
    model_from_json,
    shape_from_json,
    with_default,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import rotaries_by_kind
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's MiMoV2FlashConfig fills in.
_DEFAULTS = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "bos_token_id": 1,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _EXPERT_WIDTH, _V_DIM, _WINDOW, _VALUE_SCALE = 256, 8, 2048, 128, 129, 0.707
_FULL_EVERY = 6
_THETA = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}
_PARTIAL = 0.334
_FLOOR = 1e-20  # of the sum that weights are divided by


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """transformers 5.24 knows only its own names for what differs between layer kinds, as here."""
    num_layers = with_default(text, _DEFAULTS, "num_hidden_layers")
    kinds = layer_kinds(text, num_layers, lambda layer: layer == 0 or (layer + 1) % _FULL_EVERY == 0)
    head_dim, max_positions = head_size(text, _DEFAULTS), with_default(text, _DEFAULTS, "max_position_embeddings")
    defaults = {kind: RotaryConfig(int(head_dim * _PARTIAL), theta) for kind, theta in _THETA.items()}
    rotaries = rotaries_by_kind(text, kinds, head_dim, defaults, max_positions=max_positions)
    shape = shape_from_json(
        text, _DEFAULTS, rotary=rotaries["full_attention"], qkv_bias=text.boolean("attention_bias", False)
    )
    window = text.integer("sliding_window", _WINDOW)
    # This one counts the keys before the query.
    before = text.optional_integer("sliding_window_size")
    window = window if before is None else before + 1
    value_scale = text.optional_number("attention_value_scale")
    if "attention_value_scale" not in text:
        value_scale = _VALUE_SCALE
    layers = [
        shape.layer(
            window if kind == "sliding_attention" else None,
            num_kv_heads=shape.num_kv_heads * (2 if kind == "sliding_attention" else 1),
            v_dim=text.integer("v_head_dim", _V_DIM),
            rotary=rotaries[kind],
            value_scale=1.0 if value_scale is None else value_scale,
            has_sinks=kind == "sliding_attention",
        )
        for kind in kinds
    ]
    router = RouterConfig(
        scoring="sigmoid",
        top_k=text.integer("num_experts_per_tok", _TOP_K),
        has_correction=True,
        num_groups=text.integer("n_group", 1),
        num_chosen_groups=text.integer("topk_group", 1),
        is_renormalised=text.boolean("norm_topk_prob", True),
        renormalised_floor=_FLOOR,
        scale=text.optional_number("routed_scaling_factor") or 1.0,
    )
    num_experts = count_of(text, _NUM_EXPERTS, "n_routed_experts", "num_local_experts")
    expert = MLPConfig(text.integer("moe_intermediate_size", _EXPERT_WIDTH), shape.activation)
    sparse = sparse_kinds(text, num_layers, num_dense=1)
    experts = checked_experts(text, num_experts, expert, router)
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "mimo_v2_flash", shape, with_experts(layers, experts, sparse.__getitem__)
    )


MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    architectures=("MiMoV2FlashForCausalLM", "MiMoV2FlashModel", "mimo_v2_flash"),
    config_from_json=config_from_json,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER | {"self_attn.attention_sink_bias": "self_attn.sinks"},
        other_parts={"mtp.": "multi-token prediction"},
    ),
)
