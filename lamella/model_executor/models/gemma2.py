"""Gemma 2 text models (arXiv 2408.00118): every second layer full, scores capped, four norms a layer; and VaultGemma,
which has the two before each part alone."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import AROUND, ModelConfig, NormPlaces
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import IS_ENCODER, ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.weight_map import (
    FOUR_NORMS,
    GGUF_LAYER,
    GGUF_POST_NORMS,
    SAFETENSORS_LAYER,
    WeightMap,
)

# What transformers 5.24's Gemma2Config and VaultGemmaConfig fill in.
_DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
_WINDOW, _SCORE_CAP, _LOGITS_CAP, _QUERY_SCALAR = 4096, 50.0, 30.0, 256
_LAYERS_OF_27B = 46


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    return _from_json("gemma2", AROUND, text, end_token_ids)


def vault_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    return _from_json("vaultgemma", NormPlaces(), text, end_token_ids)


def _from_json(name: str, norms: NormPlaces, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    if text.optional_boolean("use_bidirectional_attention"):
        raise text.refuse("use_bidirectional_attention", IS_ENCODER)
    shape = shape_from_json(
        text,
        _DEFAULTS,
        activation_key="hidden_activation",
        attention_bias=True,
        scale=text.number("query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
        softcap=_cap(text, "attn_logit_softcapping", _SCORE_CAP),
        norms=norms,
    )
    kinds = layer_kinds(text, shape.num_layers, lambda layer: layer % 2 == 1)
    layers = shape.layers(kinds, window_of_sliding(text, kinds, _WINDOW))
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        name,
        shape,
        layers,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=_cap(text, "final_logit_softcapping", _LOGITS_CAP),
    )


def _cap(text: ConfigJson, key: str, default: float) -> float | None:
    return text.optional_number(key) if key in text else default


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """GGUF does not store query_pre_attn_scalar: it is head_dim, except hidden_size / num_heads in the 27B model."""
    shape = shape_from_gguf(
        config,
        tensor_names,
        activation="gelu_tanh",
        softcap=config.number("attn_logit_softcapping", _SCORE_CAP),
        norms=AROUND,
    )
    if shape.num_layers == _LAYERS_OF_27B:
        shape = shape.with_scale((shape.hidden_size / shape.num_heads) ** -0.5)
    window = config.integer("attention.sliding_window", _WINDOW)
    layers = tuple(shape.layer(None if layer % 2 else window) for layer in range(shape.num_layers))
    return model_from_gguf(
        config,
        "gemma2",
        shape,
        layers,
        tensor_names,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=config.number("final_logit_softcapping", _LOGITS_CAP),
    )


_WEIGHTS = WeightMap(
    safetensors_layer=SAFETENSORS_LAYER | FOUR_NORMS,
    gguf_layer=GGUF_LAYER | GGUF_POST_NORMS,
    safetensors_norm_offset=1.0,  # the model multiplies by 1 + w
)
GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model", "gemma2"),
    gguf_architecture="gemma2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=_WEIGHTS,
)
VAULTGEMMA = Family(
    name="vaultgemma",
    architectures=("VaultGemmaForCausalLM", "VaultGemmaModel", "vaultgemma"),
    config_from_json=vault_from_json,
    weights=_WEIGHTS,
)
