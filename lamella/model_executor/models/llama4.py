"""Llama 4 text models: chunked attention with rotary embedding turned in pairs, every fourth layer full and without
one, and experts beside a shared one, whose input their weight multiplies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import LayerConfig, ModelConfig, QueryScaleConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, has_experts, with_stored_experts
from lamella.model_executor.models.experts_json import checked_experts, count_of, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.layer_lists import layer_numbers
from lamella.model_executor.models.llama_shape import (
    LlamaShape,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.weight_map import SAFETENSORS_LAYER, TEXT_PREFIXES, TOWERS, WeightMap, shared_mlp
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's Llama4TextConfig fills in.
_DEFAULTS = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _DENSE_WIDTH = 16, 1, 16384
_NO_ROPE_EVERY, _CHUNK, _FLOOR_SCALE, _ATTN_SCALE = 4, 8192, 8192, 0.1
_EXPERTS_WITHOUT_NORMS = 128
_KINDS = ("full_attention", "chunked_attention")


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`intermediate_size` is the experts' width, `intermediate_size_mlp` that of layers without them."""
    shape = shape_from_json(text, _DEFAULTS, attention_bias=True)
    expert = MLPConfig(shape.mlp_width, shape.activation)
    router = RouterConfig(scoring="sigmoid", top_k=text.integer("num_experts_per_tok", _TOP_K), scales_input=True)
    num_experts = count_of(text, _NUM_EXPERTS, "num_local_experts")
    experts = checked_experts(text, num_experts, expert, router, shared=expert)
    sparse = layer_numbers(text, "moe_layers", shape.num_layers)
    if sparse is None:
        step = text.integer("interleave_moe_layer_step", 1)
        sparse = tuple(range(step - 1, shape.num_layers, step))
    dense = replace(shape, mlp_width=text.integer("intermediate_size_mlp", _DENSE_WIDTH))
    layers = with_experts(_layers(text, dense), experts, lambda layer: layer in sparse)
    return model_from_json(text, _DEFAULTS, end_token_ids, "llama4", shape, layers, whole=config)


def _layers(text: ConfigJson, shape: LlamaShape) -> list[LayerConfig]:
    """Heads are normed after they are rotated; without a weight that is the same as before, for turning a pair does not
    change its length. Where cosines and sines are multiplied by a factor, the norm takes it out again, all but its
    square in what is added to the mean of squares."""
    is_rotated = _is_rotated(text, shape.num_layers)
    chunk = text.optional_integer("attention_chunk_size") if "attention_chunk_size" in text else _CHUNK
    kinds = text.layer_types(shape.num_layers, _KINDS) or tuple(
        _KINDS[rotated and chunk is not None] for rotated in is_rotated
    )
    if "chunked_attention" in kinds and chunk is None:
        raise text.refuse("attention_chunk_size", "there are chunked layers, so it must be a number of keys")
    query_scale = QueryScaleConfig(
        text.number("attn_scale", _ATTN_SCALE), text.integer("floor_scale", _FLOOR_SCALE), offset=1
    )
    has_scale, has_norm = text.boolean("attn_temperature_tuning", True), text.boolean("use_qk_norm", True)
    rotary, eps = shape.rotary, None
    if has_norm and rotary.magnitude != 1.0:
        eps = text.number("rms_norm_eps", _DEFAULTS["rms_norm_eps"]) / rotary.magnitude**2
        rotary = replace(rotary, magnitude=1.0)
    return [
        shape.layer(
            kind=kind,
            window_tokens=chunk if kind == "chunked_attention" else None,
            rotary=rotary if rotated else None,
            qk_norm="heads_weightless" if rotated and has_norm else None,
            qk_norm_eps=eps if rotated else None,
            query_scale=query_scale if has_scale and not rotated else None,
        )
        for kind, rotated in zip(kinds, is_rotated, strict=True)
    ]


def _is_rotated(text: ConfigJson, num_layers: int) -> tuple[bool, ...]:
    """In `no_rope_layers` 1 stands for a layer that has an embedding; an empty list for one that is left out."""
    given = text.fields.integers("no_rope_layers", high=1) if text.fields.has_value("no_rope_layers") else ()
    if given and len(given) != num_layers:
        raise text.fields.error("no_rope_layers", f"a list of {num_layers} numbers, each of them 0 or 1")
    every = text.integer("no_rope_layer_interval", _NO_ROPE_EVERY)
    return tuple(map(bool, given)) or tuple((layer + 1) % every != 0 for layer in range(num_layers))


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format states neither chunks nor scales by position nor norms of heads: here they are the published models',
    as in llama.cpp, of which the one with 128 experts alone has no norms. A window of 0 stands for full attention with
    a rotary embedding everywhere (MobileLLM)."""
    shape = shape_from_gguf(config, tensor_names)
    shape = shape.with_scale(config.number_or_off("attention.scale") or shape.head_dim**-0.5)
    is_sparse = has_experts(config)
    qk_norm = None if is_sparse and config.integer("expert_count") == _EXPERTS_WITHOUT_NORMS else "heads_weightless"
    if config.has("attention.sliding_window") and config.window() is None:
        layers = [shape.layer(qk_norm=qk_norm)] * shape.num_layers
    else:
        chunked = shape.layer(kind="chunked_attention", window_tokens=_CHUNK, qk_norm=qk_norm)
        query_scale = QueryScaleConfig(_ATTN_SCALE, _FLOOR_SCALE, offset=1)
        full = shape.layer(rotary=None, query_scale=query_scale)
        slides = config.sliding_pattern(shape.num_layers, _NO_ROPE_EVERY)
        layers = [chunked if each else full for each in slides]
    config.integer("interleave_moe_layer_step", 1)  # which layers have experts is told by the tensors
    if is_sparse:
        router = RouterConfig(scoring="sigmoid", top_k=1, scales_input=True)
        experts = experts_from_gguf(config, router)
        experts = replace(experts, shared=experts.shared or experts.expert)
        layers = list(with_stored_experts(config, layers, experts, tensor_names))
    return model_from_gguf(config, "llama4", shape, tuple(layers), tensor_names)


_LAYER = {name.replace("mlp.", "feed_forward."): ours for name, ours in SAFETENSORS_LAYER.items()}

LLAMA4 = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4TextModel", "llama4_text"),
    multimodal_architectures=("Llama4ForConditionalGeneration", "Llama4Model", "llama4"),
    gguf_architecture="llama4",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=_LAYER | shared_mlp("feed_forward.shared_expert") | {"feed_forward.router": "mlp.router"},
        safetensors_stacks={
            "feed_forward.experts.gate_up_proj": ExpertStack(("gate_proj", "up_proj"), is_transposed=True),
            "feed_forward.experts.down_proj": ExpertStack(("down_proj",), is_transposed=True),
        },
        prefixes=TEXT_PREFIXES,
        other_parts=TOWERS,
        safetensors_pairs=True,
        gguf_pairs=True,
    ),
)
