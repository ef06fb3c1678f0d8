"""Llama text models (arXiv 2302.13971, 2407.21783), and what has their shape and names: SmolLM2 among others."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, has_experts
from lamella.model_executor.models.experts_json import with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_gguf, model_from_json, shape_from_gguf, shape_from_json
from lamella.model_executor.models.mlp_config import RouterConfig
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's LlamaConfig fills in.
_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """Raises ModelLoadError for a variant that is not built."""
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, mlp_bias=text.boolean("mlp_bias", False))
    layers = (shape.layer(),) * shape.num_layers
    return model_from_json(text, _DEFAULTS, end_token_ids, "llama", shape, layers)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Raises ModelLoadError: metadata that is missing or unusable, or a variant that is not built."""
    shape = shape_from_gguf(config, tensor_names)
    layers = (shape.layer(),) * shape.num_layers
    if has_experts(config):  # Mixtral's files say "llama"
        router = RouterConfig(scoring="softmax", top_k=1, is_renormalised=True)
        layers = with_experts(layers, experts_from_gguf(config, router), lambda layer: True)
    return model_from_gguf(config, "llama", shape, layers, tensor_names)


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "llama"),
    gguf_architecture="llama",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(gguf_pairs=True),
)
