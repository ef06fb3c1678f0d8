"""Configs of random models that GGUF files can state."""

from __future__ import annotations

from typing import Any

from tests.helpers.random_gguf_metadata import longrope_magnitude
from tests.helpers.random_models import Draw, draw_config

# What the format has, or llama.cpp assumes, in the place of what a config may say.
FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "cohere2": {"tie_word_embeddings": True, "attention_bias": False},
    "qwen2": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "qwen3": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "smollm3": {"use_sliding_window": False, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4},
    "ministral3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {
        "use_sliding_window": False,
        "layer_types": None,
        "sliding_window": None,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "use_sliding_window": False,
        "sliding_window": None,
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"layer_types": None, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
    "llama4": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": True,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "mimo_v2_flash": {"norm_topk_prob": True},
    "step3p5": {"query_pre_attn_scalar": None, "mlp_bias": False},
    "afmoe": {"mup_enabled": True, "layer_types": None, "global_attn_every_n_layers": 4},
    "phimoe": {"router_jitter_noise": 0.01},
    "laguna": {
        "num_hidden_layers": 8,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
        "moe_router_logit_softcapping": 0.0,
    },
}
ROPES = {
    "llama": ("default", "linear", "llama3"),
    "ministral3": ("yarn",),
    "phi3": ("default", "longrope"),
    "olmo3": ("default",),
    "cohere2": ("default",),
    "mixtral": ("default", "linear", "llama3"),
    "llama4": ("default", "linear", "llama3"),
    "afmoe": ("default", "linear", "yarn"),
}


def config_of(name: str, seed: int) -> Any:
    drawn = draw_config(name, seed)
    whole = drawn.to_dict()
    text = whole.get("text_config", whole)
    text |= FIXED.get(name, {})
    text |= rope_of(name, Draw(f"{name} as GGUF", seed), text)
    return type(drawn)(
        **{key: value for key, value in whole.items() if key not in ("transformers_version", "model_type")}
    )


def rope_of(name: str, draw: Draw, settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings that the format can state, and what goes with them."""
    plain = draw.rope("default")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    if name == "gemma2":
        settings["query_pre_attn_scalar"] = settings["head_dim"]
    if name == "phi3":
        return {}
    if name == "olmo3":
        return {"rope_parameters": by_kind(plain, plain)}
    if name == "ministral3":
        return {"rope_parameters": {**yarn, "llama_4_scaling_beta": 0.3}}
    if name == "gpt_oss":
        return {"rope_parameters": {**yarn, "truncate": False}}
    if name == "gemma4":
        full = settings["rope_parameters"]["full_attention"]
        return {"rope_parameters": by_kind(full, plain)}
    if name == "mimo_v2_flash":
        part = {"partial_rotary_factor": draw.one_of(0.334, 0.5)}
        return {"rope_parameters": by_kind({**draw.rope("default", "linear"), **part}, {**plain, **part})}
    if name == "step3p5":
        full = {**draw.rope("default", "linear", "llama3"), "partial_rotary_factor": 0.5}
        return {"rope_parameters": by_kind(full, {**plain, "partial_rotary_factor": 1.0})}
    if name == "laguna":
        full = {**draw.one_of(draw.rope("default", "linear"), {**yarn, "attention_factor": 1.1}, yarn)}
        parts = [{"partial_rotary_factor": draw.one_of(0.5, 1.0)} for _ in range(2)]
        num_dense, heads = draw.one_of(1, 2), None
        if draw.chance():
            heads = [settings["num_key_value_heads"] * draw.one_of(1, 2, 4) for _ in range(8)]
        return {
            "rope_parameters": by_kind({**full, **parts[0]}, {**plain, **parts[1]}),
            "num_attention_heads_per_layer": heads,
            "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (8 - num_dense),
        }
    if name == "phimoe":
        rope = dict(settings["rope_parameters"])
        if rope["rope_type"] == "longrope":
            magnitude = longrope_magnitude(
                settings["max_position_embeddings"], rope["original_max_position_embeddings"]
            )
            rope |= {"short_mscale": magnitude, "long_mscale": magnitude}
        return {"rope_parameters": rope}
    rope = draw.rope(*ROPES.get(name, ("default", "linear")))
    # The format has no names for these of YaRN.
    return {"rope_parameters": {key: rope[key] for key in rope if key not in ("mscale", "mscale_all_dim", "truncate")}}


def by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": dict(full), "sliding_attention": dict(sliding)}
