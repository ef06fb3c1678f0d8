"""Cohere 2 text models (Command R7B, Command A; arXiv 2504.00698): MLP beside attention behind one LayerNorm; full
layers do not know positions, sliding ones turn neighbours."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config import LayerConfig, ModelConfig, NormPlaces
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    LlamaShape,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
)
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's Cohere2Config fills in.
_DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "bos_token_id": 5,
    "eos_token_id": 255001, "tie_word_embeddings": True,
}  # fmt: skip
_WINDOW, _FULL_EVERY, _LOGITS_SCALE = 4096, 4, 0.0625
_ONE_NORM = NormPlaces(input=True, mlp=False)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """A head is what the heads share of hidden_size, whatever `head_dim` says, as in transformers."""
    text = ConfigJson(text.fields.overlaid(TypedFields({"head_dim": None}, text.fields.place, text.fields.prefix)))
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True, norms=_ONE_NORM, is_parallel=True)
    period = text.integer("sliding_window_pattern", _FULL_EVERY)
    kinds = layer_kinds(text, shape.num_layers, lambda layer: (layer + 1) % period == 0)
    window = window_of_sliding(text, kinds, _WINDOW)
    slides = tuple(kind == "sliding_attention" for kind in kinds)
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "cohere2",
        shape,
        _layers(shape, slides, window),
        eps_key="layer_norm_eps",
        norm_kind="layer",
        logits_scale=text.number("logit_scale", _LOGITS_SCALE),
    )


def _layers(shape: LlamaShape, slides: tuple[bool, ...], window: int | None) -> tuple[LayerConfig, ...]:
    full = shape.layer(rotary=None)
    return tuple(shape.layer(window) if each else full for each in slides)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    shape = shape_from_gguf(config, tensor_names, norms=_ONE_NORM, is_parallel=True)
    slides = config.sliding_pattern(shape.num_layers, _FULL_EVERY)
    return model_from_gguf(
        config,
        "cohere2",
        shape,
        _layers(shape, slides, config.integer("attention.sliding_window")),
        tensor_names,
        eps_key="attention.layer_norm_epsilon",
        norm_kind="layer",
        logits_scale=config.number("logit_scale", 1.0),
    )


COHERE2 = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM", "Cohere2Model", "cohere2"),
    gguf_architecture="cohere2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(safetensors_pairs=True, gguf_pairs=True),
)
