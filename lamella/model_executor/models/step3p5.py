"""Step-3.5 and 3.7 text models (StepFun): more heads in sliding layers, attention's output gated head by head, experts
beside a shared one, and bounds behind the activation in some layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.errors import ModelLoadError
from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import GateConfig, LayerConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, count_of, sparse_kinds
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import (
    KINDS,
    LlamaShape,
    head_size,
    model_from_gguf,
    model_from_json,
    shape_from_gguf,
    shape_from_json,
    window_of_sliding,
    with_default,
)
from lamella.model_executor.models.mlp_config import ExpertsConfig, GateClamp, MLPConfig, RouterConfig
from lamella.model_executor.models.rope_json import rotary_of_kind
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import GGUF_HEAD_NORMS, GGUF_LAYER, HEAD_NORMS, WeightMap
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's Step3p7TextConfig fills in.
_DEFAULTS = {
    "vocab_size": 128815,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
}
_NUM_EXPERTS, _TOP_K, _WIDTH, _NUM_DENSE = 288, 8, 1280, 3
_GATE = GateConfig("sigmoid", is_per_head=True)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """Lists of layers may be longer by the layers for multi-token prediction, which are left out."""
    num_layers = with_default(text, _DEFAULTS, "num_hidden_layers")
    num_extra = text.fields.integer("num_nextn_predict_layers", 0, high=ranges.LAYERS.high)
    text = ConfigJson(text.fields.overlaid(_shortened(text.fields, num_layers, num_extra)))
    if "gating" in text and text.fields.raw("gating") not in (True, "per-head"):
        raise text.refuse("gating", "transformers runs gates of whole heads only; write 'per-head'")
    kinds = text.layer_types(num_layers, KINDS) or (KINDS[0],) * num_layers
    rotaries = {kind: _rotary(text, kind, kinds) for kind in KINDS}
    head_dim = head_size(text, _DEFAULTS)
    scalar = text.optional_number("query_pre_attn_scalar") or head_dim
    shape = shape_from_json(
        text,
        _DEFAULTS,
        rotary=rotaries[KINDS[0]],
        attention_bias=True,
        mlp_bias=text.boolean("mlp_bias", False),
        qk_norm="heads",
        scale=scalar**-0.5,
    )
    window = window_of_sliding(text, kinds, None)
    sparse = _sparse(text, num_layers)
    limits, shared_limits = (_limits(text, key, num_layers) for key in ("swiglu_limits", "swiglu_limits_shared"))
    layers = []
    for layer, kind in enumerate(kinds):
        attention = shape.layer(
            window if kind == "sliding_attention" else None,
            num_heads=_heads(text, shape, kind, layer),
            rotary=rotaries[kind],
            gate=_GATE,
        ).attention
        mlp: MLPConfig | ExpertsConfig = MLPConfig(
            shape.mlp_width, "silu", has_bias=shape.mlp_bias, clamp=shared_limits[layer]
        )
        if sparse[layer]:
            mlp = _experts(text, shape, limits[layer], shared_limits[layer])
        layers.append(LayerConfig(attention, mlp))
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "step3p5", shape, tuple(layers), whole=config, num_left_out_layers=num_extra
    )


def _shortened(fields: TypedFields, num_layers: int, num_extra: int) -> TypedFields:
    """Lists of all layers and the extra ones, of the first ones alone."""
    keys = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta")
    lists = {key: fields.raw(key) for key in (*keys, "partial_rotary_factors")}
    cut = {
        key: value[:num_layers]
        for key, value in lists.items()
        if isinstance(value, list) and len(value) == num_layers + num_extra
    }
    return TypedFields(cut, fields.place, fields.prefix)


def _rotary(text: ConfigJson, kind: str, kinds: tuple[str, ...]) -> RotaryConfig:
    """One object for each kind in `rope_parameters`; older files list theta, and the part of a head that turns, layer
    by layer."""
    head_dim, fields = head_size(text, _DEFAULTS), text.fields
    first = kinds.index(kind) if kind in kinds else 0

    def listed(key: str, default: float) -> float:
        if not fields.has_value(key):
            return default
        values = fields.numbers(key) if isinstance(fields.raw(key), list) else (fields.number(key),) * len(kinds)
        if len(values) != len(kinds):
            raise fields.error(key, f"a list of {len(kinds)} numbers, one for each layer")
        return values[first]

    if fields.has_value("rope_scaling"):
        raise text.refuse("rope_scaling", "beside lists of layers it is not built; write rope_parameters")
    theta, part = listed("rope_theta", 10_000.0), listed("partial_rotary_factors", 1.0)
    default = RotaryConfig(int(head_dim * part), theta)
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    return rotary_of_kind(text, kind, kinds, head_dim, default, max_positions=max_positions)


def _heads(text: ConfigJson, shape: LlamaShape, kind: str, layer: int) -> int:
    """Query heads of a layer. A saved config states those that differ in `per_layer_config`."""
    if "per_layer_config" in text:
        own = text.fields.optional_object("per_layer_config").optional_object(str(layer))
        if others := sorted(set(own) - {"num_attention_heads"}):
            raise ModelLoadError(f"{own.place}: {own.prefix}{others[0]} is not built layer by layer; leave it out")
        return own.integer("num_attention_heads", shape.num_heads, low=1, high=ranges.HEADS.high)
    if kind != "sliding_attention":
        return shape.num_heads
    if text.fields.has_value("num_sliding_attention_heads"):
        return text.fields.integer("num_sliding_attention_heads", low=1, high=ranges.HEADS.high)
    other = text.fields.optional_object("attention_other_setting")
    return other.integer("num_attention_heads", shape.num_heads, low=1, high=ranges.HEADS.high)


def _sparse(text: ConfigJson, num_layers: int) -> tuple[bool, ...]:
    """`moe_layers_enum` of older files lists the layers with experts, as numbers or as text."""
    fields = text.fields
    if fields.has_value("mlp_layer_types") or not fields.has_value("moe_layers_enum"):
        return sparse_kinds(text, num_layers, num_dense=_NUM_DENSE)
    raw = fields.raw("moe_layers_enum")
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list) or not all(str(item).strip().isdigit() for item in items if str(item).strip()):
        raise fields.error("moe_layers_enum", "the numbers of layers, as a list or with commas between them")
    numbers = {int(str(item)) for item in items if str(item).strip()}
    return tuple(layer in numbers for layer in range(num_layers))


def _limits(text: ConfigJson, key: str, num_layers: int) -> tuple[GateClamp | None, ...]:
    """The bound of each layer; null and 0 stand for none."""
    if not text.fields.raw(key):
        return (None,) * num_layers
    limits = text.fields.raw(key)
    is_list = isinstance(limits, list) and len(limits) == num_layers
    if not is_list or not all(each is None or (isinstance(each, int | float) and 0 <= each < 1e6) for each in limits):
        raise text.fields.error(key, f"a list of {num_layers} numbers of at least 0")
    return tuple(GateClamp(limit=float(each), after_activation=True) if each else None for each in limits)


def _experts(text: ConfigJson, shape: LlamaShape, limit: GateClamp | None, shared: GateClamp | None) -> ExpertsConfig:
    router = RouterConfig(
        scoring="sigmoid",
        top_k=count_of(text, _TOP_K, "num_experts_per_tok", "moe_top_k"),
        has_correction=True,
        is_renormalised=True,
        scale=text.number("moe_router_scaling_factor", 1.0),
    )
    num_experts = count_of(text, _NUM_EXPERTS, "n_routed_experts", "moe_num_experts", "num_local_experts")
    expert = MLPConfig(text.integer("moe_intermediate_size", _WIDTH), "silu", clamp=limit)
    shared_width = count_of(text, _WIDTH, "share_expert_dim", "share_expert_dims")
    beside = MLPConfig(shared_width, "silu", has_bias=shape.mlp_bias, clamp=shared)
    return checked_experts(text, num_experts, expert, router, beside)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Full layers turn half of a head's `rope.dimension_count`, as llama.cpp has it. The converter works out divisors
    of whole heads' frequencies, of which every other one is a frequency of half a head."""
    num_layers = config.num_layers()
    num_stored = num_layers + config.num_extra_layers()  # lists of layers have the extra ones', too
    heads = config.integers("attention.head_count", num_stored)
    kv_heads = config.integers("attention.head_count_kv", num_stored)
    head_dim = config.integer("attention.key_length")
    dim = config.integer("rope.dimension_count", head_dim)
    if dim % 4:
        raise config.refuse("rope.dimension_count", "full layers turn half of it, in pairs; it must be a multiple of 4")
    full_rotary = config.rotary(dim // 2, 10_000.0, divisors_dim=dim)
    sliding_rotary = config.sliding_rotary(config.integer("rope.dimension_count_swa", dim), full_rotary.theta)
    shape = shape_from_gguf(
        config,
        tensor_names,
        has_partial=True,
        num_heads=heads[0],
        num_kv_heads=kv_heads[0],
        rotary=full_rotary,
        qk_norm="heads",
    )
    window = config.integer("attention.sliding_window")
    slides = config.sliding_pattern(num_stored, 1)
    router = RouterConfig(scoring="sigmoid", top_k=1, has_correction=True, is_renormalised=True)
    experts = experts_from_gguf(config, router)
    layers = [
        shape.layer(
            window if slides[layer] else None,
            num_heads=heads[layer],
            num_kv_heads=kv_heads[layer],
            rotary=sliding_rotary if slides[layer] else full_rotary,
            gate=_GATE,
        )
        for layer in range(num_layers)
    ]
    limits, shared_limits = (
        [GateClamp(limit=limit, after_activation=True) if limit else None for limit in config.limits(key, num_stored)]
        for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    )
    clamped = tuple(
        _clamped(built, limits[layer], shared_limits[layer])
        for layer, built in enumerate(with_stored_experts(config, layers, experts, tensor_names))
    )
    return model_from_gguf(config, "step3p5", shape, clamped, tensor_names)


def _clamped(layer: LayerConfig, limit: GateClamp | None, shared_limit: GateClamp | None) -> LayerConfig:
    if isinstance(layer.mlp, MLPConfig):
        return replace(layer, mlp=replace(layer.mlp, clamp=shared_limit))
    shared = layer.mlp.shared
    return replace(
        layer,
        mlp=replace(
            layer.mlp,
            expert=replace(layer.mlp.expert, clamp=limit),
            shared=None if shared is None else replace(shared, clamp=shared_limit),
        ),
    )


_SHARED = {f"share_expert.{each}": f"mlp.shared.{each}" for each in ("gate_proj", "up_proj", "down_proj")}

STEP3P5 = Family(
    name="step3p5",
    architectures=("Step3p5ForCausalLM", "Step3p7TextModel", "step3p5"),
    multimodal_architectures=("Step3p7ForConditionalGeneration", "Step3p7Model", "step3p7"),
    gguf_architecture="step35",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    weights=WeightMap(
        safetensors_layer=EXPERTS_LAYER
        | HEAD_NORMS
        | _SHARED
        | {
            "self_attn.g_proj": "self_attn.gate_proj",
            "moe.gate": "mlp.router",
            "moe.router_bias": "mlp.router.correction",
        },
        safetensors_stacks={
            f"moe.{each}.weight": ExpertStack((each,)) for each in ("gate_proj", "up_proj", "down_proj")
        },
        prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
        other_parts={
            "vision_model.": "the vision tower",
            "vit_large_projector.": "the projector of images",
            "multi_modal_projector.": "the projector of images",
        },
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | {"attn_gate": "self_attn.gate_proj"},
        safetensors_norm_offset=1.0,
        gguf_norm_offset=0.0,  # its converter has added the 1 already
    ),
)
