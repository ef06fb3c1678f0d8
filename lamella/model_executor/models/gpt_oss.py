"""GPT-OSS text models (arXiv 2508.10925): every other layer slides, attention has sinks and biases, YaRN, and experts
whose activation is bounded; published with experts in MXFP4."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import ModelConfig, RotaryConfig, YarnScaling
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf
from lamella.model_executor.models.experts_json import checked_experts, count_of, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    head_size,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.mlp_config import GateClamp, MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import flat_parameters
from lamella.model_executor.models.weight_map import GGUF_LAYER, SAFETENSORS_LAYER, WeightMap
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's GptOssConfig fills in.
_DEFAULTS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "attention_bias": True,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _WINDOW = 128, 4, 128
_ALPHA, _LIMIT = 1.702, 7.0
_YARN = YarnScaling(32.0, 4096, truncate=False)
_YARN_MAGNITUDE = 1.3465735902799727  # 0.1 ln 32 + 1


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    head_dim = head_size(text, _DEFAULTS)
    rotary = None
    if not list(flat_parameters(text)):
        theta = text.number("rope_theta", _DEFAULTS["rope_theta"])
        rotary = RotaryConfig(head_dim, theta, scaling=_YARN, magnitude=_YARN_MAGNITUDE)
    shape = shape_from_json(text, _DEFAULTS, rotary=rotary, attention_bias=True)
    clamp = GateClamp(
        limit=text.number("swiglu_limit", _LIMIT), slope=text.number("swiglu_alpha", _ALPHA), up_offset=1.0
    )
    # The softmax of the chosen logits is the one of all of them, renormalised.
    router = RouterConfig(
        scoring="softmax", top_k=text.integer("num_experts_per_tok", _TOP_K), has_bias=True, is_renormalised=True
    )
    num_experts = count_of(text, _NUM_EXPERTS, "num_local_experts", "num_experts")
    expert = MLPConfig(shape.mlp_width, "silu", has_bias=True, clamp=clamp)
    experts = checked_experts(text, num_experts, expert, router)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % 2 == 1)
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW), has_sinks=True)
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "gpt_oss", shape, with_experts(layers, experts, lambda layer: True)
    )


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format has no bounds of activations and no `truncate` of YaRN: llama.cpp has the published model's bounds,
    and whole pairs at the ramp's ends; here both are the published model's."""
    shape = shape_from_gguf(config, tensor_names)
    if isinstance(shape.rotary.scaling, YarnScaling):
        rotary = replace(shape.rotary, scaling=replace(shape.rotary.scaling, truncate=_YARN.truncate))
        shape = replace(shape, rotary=rotary)
    router = RouterConfig(scoring="softmax", top_k=1, has_bias=True, is_renormalised=True)
    experts = experts_from_gguf(config, router)
    clamp = GateClamp(limit=_LIMIT, slope=_ALPHA, up_offset=1.0)
    experts = replace(experts, expert=replace(experts.expert, has_bias=True, clamp=clamp))
    window = config.integer("attention.sliding_window", _WINDOW)
    slides = config.sliding_pattern(shape.num_layers, 2)
    layers = tuple(shape.layer(window if is_sliding else None, has_sinks=True) for is_sliding in slides)
    return model_from_gguf(config, "gpt_oss", shape, with_experts(layers, experts, lambda layer: True), tensor_names)


_BOTH, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_INTERLEAVED = ExpertStack(_BOTH, is_transposed=True, is_interleaved=True)
_TRANSPOSED = ExpertStack(_DOWN, is_transposed=True)
_BLOCKS = {
    f"mlp.experts.{name}_blocks": ExpertStack(parts, is_interleaved=len(parts) > 1, scales=f"{name}_scales")
    for name, parts in (("gate_up_proj", _BOTH), ("down_proj", _DOWN))
}

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM", "GptOssModel", "gpt_oss"),
    gguf_architecture="gpt-oss",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=SAFETENSORS_LAYER,
        gguf_layer={
            **{name: ours for name, ours in GGUF_LAYER.items() if name != "ffn_norm"},
            "post_attention_norm": "mlp_norm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        safetensors_stacks={
            "mlp.experts.gate_up_proj": _INTERLEAVED,
            "mlp.experts.gate_up_proj_bias": replace(_INTERLEAVED, is_transposed=False, ending="bias"),
            "mlp.experts.down_proj": _TRANSPOSED,
            "mlp.experts.down_proj_bias": replace(_TRANSPOSED, is_transposed=False, ending="bias"),
            **_BLOCKS,
        },
    ),
)
