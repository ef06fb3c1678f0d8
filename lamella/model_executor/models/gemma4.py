"""Gemma 4 text models: full layers with heads of their own size, whose values may be their keys; norms of Q, K and V;
layers that read others' K and V; inputs of each layer's own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import (
    AROUND,
    ModelConfig,
    PerLayerInputConfig,
    ProportionalScaling,
    RotaryConfig,
)
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import IS_ENCODER, ConfigJson, shared_kv_owners
from lamella.model_executor.models.experts_gguf import experts_from_gguf, has_experts
from lamella.model_executor.models.experts_json import checked_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    FULL,
    KINDS,
    SLIDING,
    Defaults,
    LlamaShape,
    layer_kinds,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    with_default,
)
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import read_rotary, renamed
from lamella.model_executor.models.weight_map import (
    FOUR_NORMS,
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    GGUF_POST_NORMS,
    HEAD_NORMS,
    SAFETENSORS_LAYER,
    TEXT_PREFIXES,
    TOWERS,
    WeightMap,
)
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's Gemma4TextConfig fills in.
_DEFAULTS: Defaults = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
_WINDOW, _FULL_EVERY, _FULL_HEAD_DIM = 512, 6, 512
_SLIDING_THETA = 10_000.0
_PER_LAYER_WIDTH, _PER_LAYER_VOCABULARY = 256, 262144


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    if text.fields.optional_string("use_bidirectional_attention") == "all":
        raise text.refuse("use_bidirectional_attention", IS_ENCODER)
    num_layers = with_default(text, _DEFAULTS, "num_hidden_layers")
    kinds = layer_kinds(text, num_layers, lambda layer: (layer + 1) % _FULL_EVERY == 0)
    kinds = (*kinds[:-1], FULL)  # as transformers has it, whatever the file says
    owners = shared_kv_owners(kinds, text.integer("num_kv_shared_layers", 0))
    sizes = [_head_sizes(text, kind, layer) for layer, kind in enumerate(kinds)]
    ropes = {size: _rotary(text, *size) for size in {(kind, each[0]) for kind, each in zip(kinds, sizes, strict=True)}}
    shape = shape_from_json(
        text,
        _DEFAULTS,
        rotary=next(iter(ropes.values())),
        activation_key="hidden_activation",
        attention_bias=True,
        qk_norm="heads",
        scale=1.0,
        norms=AROUND,
    )
    window = text.integer("sliding_window", _WINDOW) if SLIDING in kinds else None
    has_keys_as_values = text.boolean("attention_k_eq_v", False)
    experts = _experts(text, shape)
    layers = []
    for layer, (kind, (head_dim, num_kv_heads)) in enumerate(zip(kinds, sizes, strict=True)):
        attention: dict[str, Any] = {
            "num_kv_heads": num_kv_heads,
            "k_dim": head_dim,
            "v_dim": head_dim,
            "rotary": ropes[kind, head_dim],
            "has_value_norm": True,
            "values_are_keys": has_keys_as_values and kind == FULL,
            "kv_owner": owners.get(layer),
        }
        built = shape.layer(window if kind == SLIDING else None, **attention)
        if layer in owners and text.boolean("use_double_wide_mlp", False):
            built = replace(built, mlp=MLPConfig(2 * shape.mlp_width, shape.activation))
        layers.append(replace(built, has_scalar=True, experts_beside=experts))
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "gemma4",
        shape,
        tuple(layers),
        whole=config,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=text.optional_number("final_logit_softcapping"),
        per_layer_input=_per_layer_input(text, shape),
    )


def _experts(text: ConfigJson, shape: LlamaShape) -> ExpertsConfig | None:
    """Experts beside the MLP of every layer. transformers fills in none of the three numbers."""
    if not text.boolean("enable_moe_block", False):
        return None
    router = RouterConfig(
        scoring="softmax", top_k=text.integer("top_k_experts"), is_renormalised=True, has_expert_scale=True
    )
    expert = MLPConfig(text.integer("moe_intermediate_size"), shape.activation)
    return checked_experts(text, text.integer("num_experts"), expert, router)


def _head_sizes(text: ConfigJson, kind: str, layer: int) -> tuple[int, int]:
    """(head_dim, KV heads) of a layer. A saved config states them layer by layer in `per_layer_config`; an original one
    those of all full layers."""
    head_dim = with_default(text, _DEFAULTS, "head_dim")
    num_kv_heads = with_default(text, _DEFAULTS, "num_key_value_heads")
    if "per_layer_config" in text:
        own = text.fields_of_layer(layer, ("head_dim", "num_key_value_heads"))
        return (
            own.integer("head_dim", head_dim, low=ranges.HEAD_DIM.low, high=ranges.HEAD_DIM.high),
            own.integer("num_key_value_heads", num_kv_heads, low=ranges.HEADS.low, high=ranges.HEADS.high),
        )
    if kind == SLIDING:
        return head_dim, num_kv_heads
    # Their KV heads are their own only together with values that are keys.
    has_own_heads = text.boolean("attention_k_eq_v", False) and text.fields.has_value("num_global_key_value_heads")
    full_kv_heads = text.integer("num_global_key_value_heads") if has_own_heads else num_kv_heads
    return text.integer("global_head_dim", _FULL_HEAD_DIM), full_kv_heads


def _rotary(text: ConfigJson, kind: str, head_dim: int) -> RotaryConfig:
    if not text.fields.has_value("rope_parameters"):
        if kind == SLIDING:
            return RotaryConfig(head_dim, _SLIDING_THETA)
        return RotaryConfig(head_dim, 1_000_000.0, scaling=ProportionalScaling(head_dim // 8))
    parameters = text.fields.object("rope_parameters").object(kind)
    if not parameters.has_value("rope_theta"):
        raise parameters.error("rope_theta", "a number, as each kind of layer has its own")
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    return read_rotary(ConfigJson(renamed(parameters)), head_dim, theta=0.0, max_positions=max_positions)


def _per_layer_input(text: ConfigJson, shape: LlamaShape) -> PerLayerInputConfig | None:
    width = text.integer("hidden_size_per_layer_input", _PER_LAYER_WIDTH)
    if not width:
        return None
    vocab_size = text.integer("vocab_size_per_layer_input", _PER_LAYER_VOCABULARY)
    return PerLayerInputConfig(width, vocab_size, shape.activation)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Lengths of heads without "swa" in their keys are the full layers'. A layer without a tensor of V has K's."""
    num_layers = config.num_layers()
    kinds = tuple(KINDS[slides] for slides in config.sliding_pattern(num_layers, _FULL_EVERY))
    num_shared = config.integer("attention.shared_kv_layers", 0)
    if num_shared >= num_layers or set(kinds) - set(kinds[: num_layers - num_shared]):
        raise config.refuse("attention.shared_kv_layers", f"of {num_layers} layers, one of each kind must have K and V")
    owners = shared_kv_owners(kinds, num_shared)
    kv_heads = config.integers("attention.head_count_kv", num_layers)
    widths = config.integers("feed_forward_length", num_layers)
    shape = shape_from_gguf(
        config,
        tensor_names,
        num_kv_heads=kv_heads[0],
        mlp_width=widths[0],
        activation="gelu_tanh",
        qk_norm="heads",
        scale=1.0,
        norms=AROUND,
    )
    window = config.integer("attention.sliding_window") if SLIDING in kinds else None
    dims = {FULL: shape.head_dim, SLIDING: config.integer("attention.key_length_swa", shape.head_dim)}
    if config.integer("attention.value_length_swa", dims[SLIDING]) != dims[SLIDING]:
        raise config.refuse("attention.value_length_swa", f"it is built with heads of one length: {dims[SLIDING]}")
    sliding_dim = config.integer("rope.dimension_count_swa", dims[SLIDING])
    ropes = {FULL: shape.rotary, SLIDING: config.sliding_rotary(sliding_dim, _SLIDING_THETA)}
    experts = _gguf_experts(config)
    layers = []
    for layer, kind in enumerate(kinds):
        built = shape.layer(
            window if kind == SLIDING else None,
            num_kv_heads=kv_heads[layer],
            k_dim=dims[kind],
            v_dim=dims[kind],
            rotary=ropes[kind],
            has_value_norm=True,
            values_are_keys=layer not in owners and f"blk.{layer}.attn_v.weight" not in tensor_names,
            kv_owner=owners.get(layer),
        )
        mlp = MLPConfig(widths[layer], shape.activation)
        has_scalar = f"blk.{layer}.layer_output_scale.weight" in tensor_names
        layers.append(replace(built, mlp=mlp, has_scalar=has_scalar, experts_beside=experts))
    return model_from_gguf(
        config,
        "gemma4",
        shape,
        tuple(layers),
        tensor_names,
        embedding_scale=shape.hidden_size**0.5,
        final_logit_softcap=config.number_or_off("final_logit_softcapping"),
        per_layer_input=_gguf_per_layer_input(config, shape),
    )


def _gguf_experts(config: ConfigGguf) -> ExpertsConfig | None:
    if not has_experts(config):
        return None
    router = RouterConfig(scoring="softmax", top_k=1, is_renormalised=True, has_expert_scale=True)
    return experts_from_gguf(config, router, activation="gelu_tanh")


def _gguf_per_layer_input(config: ConfigGguf, shape: LlamaShape) -> PerLayerInputConfig | None:
    """The table may have more rows than the vocabulary has tokens."""
    width = config.integer("embedding_length_per_layer_input", 0)
    if not width:
        return None
    return PerLayerInputConfig(width, config.shape_of("per_layer_token_embd.weight")[0], shape.activation)


_SAME_NAMES = ("layer_scalar", "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
GEMMA4 = Family(
    name="gemma4",
    architectures=("Gemma4ForCausalLM", "Gemma4TextModel", "gemma4_text"),
    multimodal_architectures=("Gemma4ForConditionalGeneration", "gemma4"),
    gguf_architecture="gemma4",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer={
            **SAFETENSORS_LAYER,
            **HEAD_NORMS,
            **FOUR_NORMS,
            **{name: name for name in _SAME_NAMES},
            "router.proj": "mlp.router",
            "router.scale": "mlp.router_norm.weight",
            "router.per_expert_scale": "mlp.router.expert_scale",
            "pre_feedforward_layernorm_2": "mlp.experts_norm",
            "post_feedforward_layernorm_1": "mlp.post_dense_norm",
            "post_feedforward_layernorm_2": "mlp.post_experts_norm",
        },
        safetensors_stacks={
            "experts.gate_up_proj": ExpertStack(("gate_proj", "up_proj")),
            "experts.down_proj": ExpertStack(("down_proj",)),
        },
        gguf_layer={
            **GGUF_LAYER,
            **GGUF_HEAD_NORMS,
            **GGUF_POST_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "mlp.router_norm.weight",
            "ffn_down_exps.scale": "mlp.router.expert_scale",
            "pre_ffw_norm_2": "mlp.experts_norm",
            "post_ffw_norm_1": "mlp.post_dense_norm",
            "post_ffw_norm_2": "mlp.post_experts_norm",
        },
        prefixes=TEXT_PREFIXES,
        other_parts={**TOWERS, "audio_tower.": "the audio tower", "embed_audio.": "the audio projector"},
    ),
)
