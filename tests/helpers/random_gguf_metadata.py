"""What llama.cpp's converter writes of a transformers config, key by key."""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_EXTRA = 1  # layers for multi-token prediction, of families whose converter writes them
WITH_EXTRA_LAYERS = ("mimo_v2_flash", "step3p5")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4", "mimo_v2_flash", "afmoe", "laguna", "phimoe")
SLIDING, FULL = "sliding_attention", "full_attention"


def metadata(name: str, config: Any) -> dict[str, Any]:
    """Without the architecture's name before the keys."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_of(config, FULL)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + (NUM_EXTRA if name in WITH_EXTRA_LAYERS else 0),
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **_norms(config),
        **_scaling(config, rope),
    }
    if "sliding_attention" in config.rope_parameters:
        keys["rope.freq_base_swa"] = float(rope_of(config, SLIDING)["rope_theta"])
    if name in WITH_EXPERTS:
        experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
        keys["expert_count"] = experts or config.num_local_experts
        keys["expert_used_count"] = config.num_experts_per_tok
        keys["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if name in WITH_EXTRA_LAYERS:
        keys["nextn_predict_layers"] = NUM_EXTRA
    own = _OWN.get(name)
    return keys if own is None else {**keys, **own(config, keys)}


def rope_of(config: Any, kind: str) -> dict[str, Any]:
    rope = config.rope_parameters
    return dict(rope.get(kind, rope))


def _norms(config: Any) -> dict[str, Any]:
    keys = {}
    for theirs in ("norm_epsilon", "layer_norm_eps"):
        if hasattr(config, theirs):
            keys["attention.layer_norm_epsilon"] = getattr(config, theirs)
    if hasattr(config, "rms_norm_eps"):
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    return keys


def _scaling(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        stated = {key: rope[theirs] for theirs, key in names.items() if rope.get(theirs) is not None}
        return keys | {f"rope.scaling.{key}": float(value) for key, value in stated.items()}
    if rope["rope_type"] == "longrope":
        original = longrope_original(config)
        magnitude = longrope_magnitude(config.max_position_embeddings, original)
        return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": magnitude}
    return {}


def longrope_original(config: Any) -> int:
    original = getattr(config, "original_max_position_embeddings", None)
    return int(original or config.rope_parameters["original_max_position_embeddings"])


def longrope_magnitude(max_positions: int, original: int) -> float:
    return float((1 + np.log(max_positions / original) / np.log(original)) ** 0.5)


def _slides(config: Any) -> list[bool]:
    return [kind == SLIDING for kind in config.layer_types]


def _window(config: Any, with_pattern: bool = False) -> dict[str, Any]:
    if not config.sliding_window:
        return {}
    keys = {"attention.sliding_window": config.sliding_window}
    return keys | ({"attention.sliding_window_pattern": _slides(config)} if with_pattern else {})


def _gemma2(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**_window(config), **{cap: getattr(config, cap) for cap in caps}}


def _granite(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _granite_moe(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    shared = getattr(config, "shared_intermediate_size", 0)
    return {
        **_granite(config, keys),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def _gemma4(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    slides, num_layers = _slides(config), config.num_hidden_layers
    head_dims, kv_heads = (_of_layers(config, key) for key in ("head_dim", "num_key_value_heads"))
    full_dim, sliding_dim = head_dims[slides.index(False)], head_dims[slides.index(True)]
    own = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": sliding_dim,
        "attention.value_length_swa": sliding_dim,
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": sliding_dim,
    }
    if config.use_double_wide_mlp:
        widths = [config.intermediate_size] * num_layers
        first_shared = num_layers - config.num_kv_shared_layers
        own["feed_forward_length"] = [width * (1 + (layer >= first_shared)) for layer, width in enumerate(widths)]
    if len(set(kv_heads)) > 1:
        own["attention.head_count_kv"] = kv_heads
    if config.final_logit_softcapping:
        own["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        own |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        own["expert_feed_forward_length"] = config.moe_intermediate_size
    return own


def _of_layers(config: Any, key: str) -> list[int]:
    return [getattr(config.per_layer_config[layer], key) for layer in range(config.num_hidden_layers)]


def _llama4(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _mimo(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    slides = [*_slides(config), *[True] * NUM_EXTRA]
    own = {
        "attention.head_count_kv": [config.num_key_value_heads * (1 + each) for each in slides],
        "attention.sliding_window": config.sliding_window - 1,  # the published field, see configuration_mimo_v2_flash
        "attention.sliding_window_pattern": slides,
        "attention.value_length": config.v_head_dim,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if config.attention_value_scale is not None:
        own["attention.value_scale"] = float(config.attention_value_scale)
    if config.routed_scaling_factor is not None:
        own["expert_weights_scale"] = float(config.routed_scaling_factor)
    return own


def _step(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    slides, num_layers = [*_slides(config), *[False] * NUM_EXTRA], config.num_hidden_layers
    heads = (config.num_attention_heads, config.num_sliding_attention_heads or config.num_attention_heads)
    own = {
        "attention.head_count": [heads[each] for each in slides],
        "attention.head_count_kv": [config.num_key_value_heads] * len(slides),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.share_expert_dim,
        "expert_weights_scale": config.moe_router_scaling_factor,
        "expert_weights_norm": True,
        "moe_every_n_layers": 1,
        "rope.dimension_count": None,  # the whole head, of which full layers turn half
    }
    for theirs, key in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        limits = getattr(config, theirs)
        if limits is not None:
            own[key] = [float(each or 0) for each in limits][:num_layers] + [0.0] * NUM_EXTRA
    return own


def _afmoe(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_shared_count": config.num_shared_experts,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_weights_scale": float(config.route_scale),
        "expert_gating_func": 2,
    }


def _laguna(config: Any, keys: dict[str, Any]) -> dict[str, Any]:
    sliding = rope_of(config, SLIDING)
    per_layer = config.num_attention_heads_per_layer or [config.num_attention_heads] * config.num_hidden_layers
    return {
        "attention.head_count": list(per_layer),
        "attention.sliding_window": config.sliding_window,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.moe_routed_scaling_factor),
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "rope.dimension_count_swa": int(config.head_dim * sliding.get("partial_rotary_factor", 1.0)),
    }


_OWN = {
    "gemma2": _gemma2,
    "cohere2": lambda config, keys: {**_window(config, with_pattern=True), "logit_scale": config.logit_scale},
    "olmo3": lambda config, keys: _window(config, with_pattern=True),
    "exaone4": lambda config, keys: _window(config, with_pattern=True),
    "phi3": lambda config, keys: {"attention.sliding_window": config.sliding_window or 0},
    "phimoe": lambda config, keys: {"attention.sliding_window": config.sliding_window or 0},
    "gpt_oss": lambda config, keys: _window(config),
    "ministral3": lambda config, keys: {"attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"]},
    "qwen2_moe": lambda config, keys: {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size},
    "granite": _granite,
    "granitemoe": _granite_moe,
    "gemma4": _gemma4,
    "llama4": _llama4,
    "mimo_v2_flash": _mimo,
    "step3p5": _step,
    "afmoe": _afmoe,
    "laguna": _laguna,
}
