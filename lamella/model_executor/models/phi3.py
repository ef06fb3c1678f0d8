"""Phi-3 and Phi-4 text models (arXiv 2404.14219): Llama's layers with fused weights, heads that may be rotated in part,
and rotary embeddings that differ for long texts."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    head_size,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    with_default,
)
from lamella.model_executor.models.rope_json import flat_parameters, flat_rotary
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import GGUF_LAYER, SAFETENSORS_LAYER, WeightMap

# What transformers 5.24's Phi3Config fills in.
_DEFAULTS = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
_OLD_KINDS = ("su", "yarn")  # read as longrope, whatever they mean elsewhere


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """A window that is null or left out is none. The original length stands beside the rotary embedding's own fields
    and wins over theirs, even where it is a default."""
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    original = with_default(text, _DEFAULTS, "original_max_position_embeddings")
    parameters = flat_parameters(text)
    kind = parameters.optional_string("rope_type") or "default"
    kind = "longrope" if kind in _OLD_KINDS else kind
    if kind not in ("default", "longrope"):
        raise ConfigJson(parameters).refuse("rope_type", "Phi 3 has default and longrope")
    read = {key: parameters.raw(key) for key in parameters} | {"rope_type": kind, "type": None}
    overlaid = TypedFields(
        {"rope_parameters": read, "rope_scaling": None, "original_max_position_embeddings": original},
        text.fields.place,
    )
    rotary = flat_rotary(
        ConfigJson(text.fields.overlaid(overlaid)),
        head_size(text, _DEFAULTS),
        max_positions=max_positions,
        has_partial=True,
    )
    shape = shape_from_json(text, _DEFAULTS, rotary=rotary)
    layers = (shape.layer(text.optional_integer("sliding_window")),) * shape.num_layers
    return model_from_json(text, _DEFAULTS, end_token_ids, "phi3", shape, layers)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    shape = shape_from_gguf(config, tensor_names, has_partial=True)
    return model_from_gguf(config, "phi3", shape, (shape.layer(config.window()),) * shape.num_layers, tensor_names)


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model", "phi3"),
    gguf_architecture="phi3",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer={
            **SAFETENSORS_LAYER,
            "self_attn.qkv_proj": "self_attn.qkv_proj",
            "mlp.gate_up_proj": "mlp.gate_up_proj",
        },
        gguf_layer={**GGUF_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
)
