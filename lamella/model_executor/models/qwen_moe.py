"""Qwen2 and Qwen3 text models with experts (arXiv 2407.10671, 2505.09388): experts in every layer or in some, and in
Qwen2 a shared one beside them, which has a gate."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lamella.model_executor.models.config import LayerConfig, ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf
from lamella.model_executor.models.experts_json import (
    EXPERTS_LAYER,
    checked_experts,
    count_of,
    with_experts,
)
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.layer_lists import layer_numbers
from lamella.model_executor.models.llama_shape import (
    LlamaShape,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
)
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig
from lamella.model_executor.models.qwen2 import refuse_without_window, window_of_switched
from lamella.model_executor.models.weight_map import GGUF_HEAD_NORMS, GGUF_LAYER, HEAD_NORMS, WeightMap

# What transformers 5.24's Qwen2MoeConfig and Qwen3MoeConfig fill in.
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN2_EXPERTS = {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60}
_QWEN3 = _QWEN2 | {"intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
_QWEN3_EXPERTS = {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128}
_SHARED_WIDTH, _MAX_WINDOW_LAYERS = 5632, 28


def qwen2_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """Where windows are switched on, every other one of the first `max_window_layers` layers slides."""
    shape = shape_from_json(text, _QWEN2, qkv_bias=text.boolean("qkv_bias", True))
    window = window_of_switched(text)
    first_full = text.integer("max_window_layers", _MAX_WINDOW_LAYERS) if window is not None else 0
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % 2 == 1 or layer >= first_full)
    refuse_without_window(text, kinds, window)
    layers = shape.layers(kinds, window)
    shared = MLPConfig(text.integer("shared_expert_intermediate_size", _SHARED_WIDTH), shape.activation)
    experts = replace(_experts(text, _QWEN2_EXPERTS, shape), shared=shared, shared_has_gate=True)
    return _model(text, _QWEN2, end_token_ids, "qwen2_moe", shape, layers, experts)


def qwen3_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """Where windows are switched on, every layer slides."""
    shape = shape_from_json(text, _QWEN3, attention_bias=True, qk_norm="heads")
    layers = (shape.layer(window_of_switched(text)),) * shape.num_layers
    experts = _experts(text, _QWEN3_EXPERTS, shape)
    return _model(text, _QWEN3, end_token_ids, "qwen3_moe", shape, layers, experts)


def _experts(text: ConfigJson, defaults: dict[str, int], shape: LlamaShape) -> ExpertsConfig:
    router = RouterConfig(
        scoring="softmax",
        top_k=text.integer("num_experts_per_tok", defaults["num_experts_per_tok"]),
        is_renormalised=text.boolean("norm_topk_prob", False),
    )
    width = text.integer("moe_intermediate_size", defaults["moe_intermediate_size"])
    # Qwen3's class saves the number under the second name.
    num_experts = count_of(text, defaults["num_experts"], "num_experts", "num_local_experts")
    return checked_experts(text, num_experts, MLPConfig(width, shape.activation), router)


def _model(
    text: ConfigJson,
    defaults: dict[str, int],
    end_token_ids: tuple[int, ...] | None,
    name: str,
    shape: LlamaShape,
    layers: tuple[LayerConfig, ...],
    experts: ExpertsConfig,
) -> ModelConfig:
    dense, step = layer_numbers(text, "mlp_only_layers", shape.num_layers) or (), text.integer("decoder_sparse_step", 1)
    layers = with_experts(layers, experts, lambda layer: layer not in dense and (layer + 1) % step == 0)
    return model_from_json(text, defaults, end_token_ids, name, shape, layers)


def _from_gguf(architecture: str, name: str) -> Callable[[ConfigGguf, Collection[str]], ModelConfig]:
    """The format states no windows for these. llama.cpp renormalises Qwen3's weights and not Qwen2's."""

    def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
        is_qwen3 = architecture == "qwen3moe"
        shape = shape_from_gguf(config, tensor_names, qk_norm="heads" if is_qwen3 else None)
        router = RouterConfig(scoring="softmax", top_k=1, is_renormalised=is_qwen3)
        experts = experts_from_gguf(config, router, shared_has_gate=not is_qwen3)
        layers = with_experts((shape.layer(),) * shape.num_layers, experts, lambda layer: True)
        return model_from_gguf(config, name, shape, layers, tensor_names)

    return config_from_gguf


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel", "qwen2_moe"),
    gguf_architecture="qwen2moe",
    config_from_json=qwen2_from_json,
    config_from_gguf=_from_gguf("qwen2moe", "qwen2_moe"),
    weights=WeightMap(safetensors_layer=EXPERTS_LAYER),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel", "qwen3_moe"),
    gguf_architecture="qwen3moe",
    config_from_json=qwen3_from_json,
    config_from_gguf=_from_gguf("qwen3moe", "qwen3_moe"),
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER | HEAD_NORMS,
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS,
    ),
)
