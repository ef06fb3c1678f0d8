"""Phi-3.5-MoE text models (arXiv 2404.14219): LayerNorms and biases, LongRoPE, and two experts a token, which a sparse
mixer picks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models.config import LongRopeScaling, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, count_of, with_experts
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    head_size,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    with_default,
)
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import flat_rotary
from lamella.model_executor.models.weight_map import WeightMap

# What transformers 5.24's PhimoeConfig fills in.
_DEFAULTS = {
    "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _JITTER = 16, 2, 0.01
# Of the published model: its lengths, and its factor of cosines and sines, which is not what these lengths give.
_POSITIONS, _ORIGINAL_POSITIONS, _PUBLISHED_MAGNITUDE = 131072, 4096, 1.243163121016122


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """transformers picks two experts whatever num_experts_per_tok says."""
    if text.integer("num_experts_per_tok", _TOP_K) != _TOP_K:
        raise text.not_built("num_experts_per_tok", f"the sparse mixer picks {_TOP_K}, in transformers too; write that")
    shape = shape_from_json(text, _DEFAULTS, rotary=_rotary(text), attention_bias=True)
    router = RouterConfig(scoring="sparse_mixer", top_k=_TOP_K, jitter=text.number("router_jitter_noise", _JITTER))
    num_experts = count_of(text, _NUM_EXPERTS, "num_local_experts")
    experts = checked_experts(text, num_experts, MLPConfig(shape.mlp_width, shape.activation), router)
    # transformers masks 0 <= q - k < sliding_window: the query itself is counted already.
    layers = (shape.layer(text.optional_integer("sliding_window")),) * shape.num_layers
    return model_from_json(
        text,
        _DEFAULTS,
        end_token_ids,
        "phimoe",
        shape,
        with_experts(layers, experts, lambda layer: True),
        norm_kind="layer",
        norm_has_bias=True,
        has_head_bias=text.boolean("lm_head_bias", False),
    )


def _rotary(text: ConfigJson) -> RotaryConfig:
    """Past the original length transformers 5.24 goes on with the short divisors, and with `long_mscale` in place of
    `short_mscale`; these are the same in the published model."""
    rotary = flat_rotary(
        text,
        head_size(text, _DEFAULTS),
        max_positions=with_default(text, _DEFAULTS, "max_position_embeddings"),
        theta=_DEFAULTS["rope_theta"],
        known=frozenset({"short_mscale", "long_mscale"}),
    )
    if not isinstance(rotary.scaling, LongRopeScaling):
        return rotary
    key = "rope_scaling" if text.fields.has_value("rope_scaling") else "rope_parameters"
    parameters = text.object(key).fields
    short, long = (parameters.number(name, above=0.0) for name in ("short_mscale", "long_mscale"))
    if short != long:
        raise text.object(key).not_built("long_mscale", f"it is built equal to short_mscale, which is {short}")
    scaling = replace(rotary.scaling, long_divisors=rotary.scaling.short_divisors)
    return replace(rotary, scaling=scaling, magnitude=short)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """The format has no jitter, which here is the published model's, and the tensors tell of biases. llama.cpp takes
    RMS norms and an ordinary softmax for such files; here they run as transformers runs the model.

    Past the original length the short divisors stay, as in `_rotary`.
    """
    shape = shape_from_gguf(config, tensor_names)
    if isinstance(shape.rotary.scaling, LongRopeScaling):
        scaling = replace(shape.rotary.scaling, long_divisors=shape.rotary.scaling.short_divisors)
        magnitude = _magnitude(config, shape.rotary)
        shape = replace(shape, rotary=replace(shape.rotary, scaling=scaling, magnitude=magnitude))
    router = RouterConfig(scoring="sparse_mixer", top_k=_TOP_K, jitter=_JITTER)
    experts = experts_from_gguf(config, router)
    if experts.router.top_k != _TOP_K:
        raise config.refuse("expert_used_count", f"the sparse mixer picks {_TOP_K}, in transformers too; write that")
    layers = (shape.layer(config.window()),) * shape.num_layers
    return model_from_gguf(
        config,
        "phimoe",
        shape,
        with_stored_experts(config, layers, experts, tensor_names),
        tensor_names,
        norm_kind="layer",
        norm_has_bias=True,
        has_head_bias="output.bias" in tensor_names,
    )


def _magnitude(config: ConfigGguf, rotary: RotaryConfig) -> float:
    """The converter works it out from the lengths, as Phi 3 has it, and leaves the config's own out."""
    assert isinstance(rotary.scaling, LongRopeScaling)
    lengths = config.integer("context_length"), rotary.scaling.original_positions
    worked_out = (
        math.sqrt(1.0 + math.log(lengths[0] / lengths[1]) / math.log(lengths[1])) if lengths[0] > lengths[1] else 1.0
    )
    is_published = lengths == (_POSITIONS, _ORIGINAL_POSITIONS) and math.isclose(
        rotary.magnitude, worked_out, rel_tol=1e-5
    )
    return _PUBLISHED_MAGNITUDE if is_published else rotary.magnitude


PHIMOE = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhimoeModel", "PhiMoEForCausalLM", "phimoe"),
    gguf_architecture="phimoe",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER
        | {
            "block_sparse_moe.gate": "mlp.router",
            "block_sparse_moe.router": "mlp.router",
            "post_attention_layernorm": "mlp_norm",
        },
        experts_name="block_sparse_moe.experts",
        expert_layer={"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    ),
)
