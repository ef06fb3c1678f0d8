"""Rows of `random_models.ARCHITECTURES` whose layers have experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.random_models import Draw

ROPES = ("default", "linear", "llama3", "yarn")


def _config(class_name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{class_name}Config")(**settings)


def _mixtral(draw: Draw) -> Any:
    return _config(
        "Mixtral",
        **draw.sizes(2, hidden_size=64, head_dim=draw.head_dim),
        num_local_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        sliding_window=draw.one_of(None, draw.window),
        rope_parameters=draw.rope(*ROPES),
    )


def _qwen2_moe(draw: Draw) -> Any:
    return _config(
        "Qwen2Moe",
        **draw.sizes(4),
        num_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        shared_expert_intermediate_size=draw.one_of(32, 40),
        norm_topk_prob=draw.chance(),
        qkv_bias=draw.chance(),
        use_sliding_window=draw.chance(),
        sliding_window=draw.window,
        max_window_layers=draw.one_of(2, 4),
        mlp_only_layers=draw.one_of(None, [], [1]),
        rope_parameters=draw.rope(*ROPES),
    )


def _qwen3_moe(draw: Draw) -> Any:
    return _config(
        "Qwen3Moe",
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        num_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        norm_topk_prob=draw.chance(),
        use_sliding_window=draw.chance(),
        sliding_window=draw.window,
        decoder_sparse_step=draw.one_of(1, 2),
        mlp_only_layers=draw.one_of(None, [1]),
        attention_bias=draw.chance(),
        rope_parameters=draw.rope(*ROPES),
    )


def _gpt_oss(draw: Draw) -> Any:
    return _config(
        "GptOss",
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        num_local_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        sliding_window=draw.window,
        swiglu_limit=draw.one_of(7.0, 0.5),
        swiglu_alpha=draw.one_of(1.702, 1.0),
        attention_bias=draw.chance(),
        rope_parameters=draw.one_of(None, draw.rope(*ROPES)),
        **draw.one_of({}, {"layer_types": draw.kinds(4)}),
    )


def _llama4(draw: Draw) -> Any:
    return _config(
        "Llama4Text",
        **draw.sizes(8, hidden_size=64, head_dim=draw.head_dim),
        intermediate_size_mlp=draw.one_of(64, 80),
        num_local_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2),
        attention_chunk_size=draw.window,
        floor_scale=draw.one_of(4, 8, 16),
        attn_scale=draw.number(0.1, 0.6),
        attn_temperature_tuning=draw.chance(),
        use_qk_norm=draw.chance(),
        attention_bias=draw.chance(),
        rope_parameters=draw.rope("default", "linear", "llama3", "yarn"),
        **draw.one_of({}, {"interleave_moe_layer_step": 2}, {"moe_layers": [0, 5]}),
        **draw.one_of({}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [draw.one_of(0, 1) for _ in range(8)]}),
    )


def _mimo_v2_flash(draw: Draw) -> Any:
    def rope() -> dict[str, Any]:
        partial = draw.one_of(0.334, 0.5, 0.41)  # the last of 32 and of 48 elements is an odd number
        return {"rope_type": "default", "rope_theta": draw.one_of(1e3, 1e4), "partial_rotary_factor": partial}

    parameters = {kind: rope() for kind in ("full_attention", "sliding_attention")}
    groups = draw.one_of(1, 4)
    settings = draw.sizes(7, hidden_size=64, head_dim=draw.one_of(32, 48))
    return _config(
        "MiMoV2Flash",
        **{**settings, "num_attention_heads": 4, "num_key_value_heads": draw.one_of(1, 2)},
        v_head_dim=draw.one_of(16, 32),
        n_routed_experts=8,
        num_experts_per_tok=draw.one_of(1, 2, 3),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        n_group=groups,
        topk_group=draw.one_of(2, 3) if groups > 1 else 1,
        norm_topk_prob=draw.chance(),
        routed_scaling_factor=draw.one_of(None, 1.5),
        attention_value_scale=draw.one_of(None, 0.707, 1.3),
        attention_bias=draw.chance(),
        sliding_window=draw.window,
        rope_parameters=draw.one_of(None, parameters),
        **draw.one_of({}, {"layer_types": draw.kinds(7)}),
    )


def _afmoe(draw: Draw) -> Any:
    return _config(
        "Afmoe",
        **draw.sizes(8, hidden_size=64, head_dim=draw.head_dim),
        num_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        num_shared_experts=draw.one_of(1, 2),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        num_dense_layers=draw.one_of(0, 1, 3),
        route_scale=draw.number(0.5, 3),
        mup_enabled=draw.chance(),
        sliding_window=draw.window,
        attention_bias=draw.chance(),
        rope_parameters=draw.rope(*ROPES),
        **draw.one_of({}, {"layer_types": draw.kinds(8)}, {"global_attn_every_n_layers": 2}),
    )


def _laguna(draw: Draw) -> Any:
    def rope() -> dict[str, Any]:
        return {**draw.rope("default", "linear"), "partial_rotary_factor": draw.one_of(0.5, 1.0)}

    parameters = {kind: rope() for kind in ("full_attention", "sliding_attention")}
    heads = [draw.num_kv_heads * draw.one_of(1, 2, 4) for _ in range(4)]
    return _config(
        "Laguna",
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        num_attention_heads_per_layer=draw.one_of(None, heads),
        num_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        shared_expert_intermediate_size=draw.one_of(32, 40),
        moe_routed_scaling_factor=draw.number(0.5, 3),
        moe_router_logit_softcapping=draw.one_of(0.0, 1.5),
        gating=draw.one_of(True, "per-head", "per-element"),
        sliding_window=draw.window,
        attention_bias=draw.chance(),
        layer_types=draw.kinds(4),
        mlp_layer_types=draw.one_of(None, ["sparse", "dense", "dense", "sparse"]),
        rope_parameters=draw.one_of(None, parameters),
    )


def _phimoe(draw: Draw) -> Any:
    rope = draw.rope("default", "longrope")
    if rope["rope_type"] == "longrope":
        rope |= {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 64}
    return _config(
        "Phimoe",
        **draw.sizes(2),
        num_local_experts=draw.one_of(4, 6),
        router_jitter_noise=draw.one_of(0.01, 0.3),
        sliding_window=draw.one_of(None, draw.window),
        attention_bias=draw.chance(),
        lm_head_bias=draw.chance(),
        rope_parameters=rope,
    )


def _step3p5(draw: Draw) -> Any:
    """The text model of a checkpoint with a vision tower, which is as small as it can be."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig, Step3p7VisionConfig

    def rope() -> dict[str, Any]:
        return {**draw.rope("default", "linear"), "partial_rotary_factor": draw.one_of(0.5, 1.0)}

    kinds = draw.kinds(5)
    limits = [draw.one_of(0.0, 0.2, None) for _ in kinds]
    text = Step3p7TextConfig(
        **draw.sizes(5, hidden_size=64, head_dim=draw.head_dim),
        num_sliding_attention_heads=draw.one_of(None, 2 * draw.num_heads),
        n_routed_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        moe_intermediate_size=draw.one_of(16, 24, 48),
        share_expert_dim=draw.one_of(32, 40),
        moe_router_scaling_factor=draw.number(0.5, 3),
        query_pre_attn_scalar=draw.one_of(None, 24),
        swiglu_limits=draw.one_of(None, limits),
        swiglu_limits_shared=draw.one_of(None, limits[::-1]),
        attention_bias=draw.chance(),
        mlp_bias=draw.chance(),
        sliding_window=draw.window,
        layer_types=kinds,
        mlp_layer_types=draw.one_of(None, ["dense", "sparse", "sparse", "dense", "sparse"]),
        rope_parameters={kind: rope() for kind in ("full_attention", "sliding_attention")},
    )
    vision = Step3p7VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28
    )
    return _config("Step3p7", text_config=text.to_dict(), vision_config=vision.to_dict())


EXPERTS: dict[str, Callable[[Draw], Any]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "mimo_v2_flash": _mimo_v2_flash,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "phimoe": _phimoe,
    "step3p5": _step3p5,
}
