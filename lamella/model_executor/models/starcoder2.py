"""StarCoder 2 (arXiv 2402.19173): LayerNorms, biases everywhere, an MLP without a gate, and one window for all layers,
if any."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_gguf, model_from_json, shape_from_gguf, shape_from_json
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, WeightMap

# What transformers 5.24's Starcoder2Config fills in.
_DEFAULTS = {
    "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "bos_token_id": 50256, "eos_token_id": 50256,
    "tie_word_embeddings": True,
}  # fmt: skip


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    has_bias = text.boolean("use_bias", True)
    shape = shape_from_json(
        text, _DEFAULTS, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias, has_gated_mlp=False
    )
    layers = (shape.layer(text.optional_integer("sliding_window")),) * shape.num_layers
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "starcoder2",
        shape,
        layers,
        eps_key="norm_epsilon",
        norm_kind="layer",
        norm_has_bias=True,
    )


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format states no window for this architecture."""
    shape = shape_from_gguf(config, tensor_names, activation="gelu_tanh", has_gated_mlp=False)
    return model_from_gguf(
        config,
        "starcoder2",
        shape,
        (shape.layer(),) * shape.num_layers,
        tensor_names,
        eps_key="attention.layer_norm_epsilon",
        norm_kind="layer",
        norm_has_bias=True,
    )


STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model", "starcoder2"),
    gguf_architecture="starcoder2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer={**SAFETENSORS_LAYER, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    ),
)
