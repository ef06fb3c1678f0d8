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
        rope_parameters=draw.rope("default", "linear", "llama3"),
        **draw.one_of({}, {"interleave_moe_layer_step": 2}, {"moe_layers": [0, 5]}),
        **draw.one_of({}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [draw.one_of(0, 1) for _ in range(8)]}),
    )


def _mimo_v2_flash(draw: Draw) -> Any:
    def rope() -> dict[str, Any]:
        partial = draw.one_of(0.334, 0.5)
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


EXPERTS: dict[str, Callable[[Draw], Any]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "mimo_v2_flash": _mimo_v2_flash,
}
