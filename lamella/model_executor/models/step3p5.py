"""Step-3.5 and 3.7 text models (StepFun): more heads in sliding layers, attention's output gated head by head, experts
beside a shared one, and bounds behind the activation in some layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import GateConfig, LayerConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_gguf import experts_from_gguf, with_stored_experts
from lamella.model_executor.models.experts_json import EXPERTS_LAYER, checked_experts, count_of, sparse_kinds
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.layer_lists import number_of_each, of_first_layers
from lamella.model_executor.models.llama_shape import (
    FULL,
    KINDS,
    SLIDING,
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
from lamella.model_executor.models.rope_json import rotaries_by_kind
from lamella.model_executor.models.weight_map import (
    GGUF_HEAD_NORMS,
    GGUF_LAYER,
    HEAD_NORMS,
    MLP_PARTS,
    TEXT_PREFIXES,
    TOWERS,
    WeightMap,
    shared_mlp,
)
from lamella.model_executor.weights.stacked import ExpertStack

# What transformers 5.24's Step3p7TextConfig fills in.
_DEFAULTS = {
    "vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_NUM_EXPERTS, _TOP_K, _WIDTH, _NUM_DENSE = 288, 8, 1280, 3
_LISTS = (
    "layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors",
)  # fmt: skip
_GATE = GateConfig("sigmoid", is_per_head=True)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """Lists of layers may be longer by the layers for multi-token prediction, which are left out."""
    num_layers = with_default(text, _DEFAULTS, "num_hidden_layers")
    num_extra = text.fields.integer("num_nextn_predict_layers", 0, high=ranges.LAYERS.high)
    text = of_first_layers(text, _LISTS, num_layers, num_extra)
    if "gating" in text and text.fields.raw("gating") not in (True, "per-head"):
        raise text.refuse("gating", "transformers runs gates of whole heads only; write 'per-head'")
    kinds = text.layer_types(num_layers, KINDS) or (FULL,) * num_layers
    rotaries = _rotaries(text, kinds)
    head_dim = head_size(text, _DEFAULTS)
    scalar = text.optional_number("query_pre_attn_scalar") or head_dim
    shape = shape_from_json(
        text,
        _DEFAULTS,
        rotary=rotaries[FULL],
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
            window if kind == SLIDING else None,
            num_heads=_heads(text, shape, kind, layer),
            rotary=rotaries[kind],
            gate=_GATE,
        ).attention
        mlp: MLPConfig | ExpertsConfig = MLPConfig(
            shape.mlp_width, shape.activation, has_bias=shape.mlp_bias, clamp=shared_limits[layer]
        )
        if sparse[layer]:
            mlp = _experts(text, shape, limits[layer], shared_limits[layer])
        layers.append(LayerConfig(attention, mlp))
    return model_from_json(
        text, _DEFAULTS, end_token_ids, "step3p5", shape, tuple(layers), whole=config, num_left_out_layers=num_extra
    )


def _rotaries(text: ConfigJson, kinds: tuple[str, ...]) -> dict[str, RotaryConfig]:
    """One object for each kind in `rope_parameters`; older files list theta, and the part of a head that turns, layer
    by layer."""
    head_dim = head_size(text, _DEFAULTS)
    if text.fields.has_value("rope_scaling"):
        raise text.not_built("rope_scaling", "beside lists of layers it is not built; write rope_parameters")

    thetas = number_of_each(text, "rope_theta", 10_000.0, len(kinds))
    parts = number_of_each(text, "partial_rotary_factors", 1.0, len(kinds))
    first = {kind: kinds.index(kind) if kind in kinds else 0 for kind in KINDS}
    defaults = {kind: RotaryConfig(int(head_dim * parts[at]), thetas[at]) for kind, at in first.items()}
    max_positions = with_default(text, _DEFAULTS, "max_position_embeddings")
    return rotaries_by_kind(text, kinds, head_dim, defaults, max_positions=max_positions)


def _heads(text: ConfigJson, shape: LlamaShape, kind: str, layer: int) -> int:
    """Query heads of a layer. A saved config states those that differ in `per_layer_config`."""
    if "per_layer_config" in text:
        own = text.fields_of_layer(layer, ("num_attention_heads",))
        return own.integer("num_attention_heads", shape.num_heads, low=1, high=ranges.HEADS.high)
    if kind != SLIDING:
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
    expert = MLPConfig(text.integer("moe_intermediate_size", _WIDTH), shape.activation, clamp=limit)
    shared_width = count_of(text, _WIDTH, "share_expert_dim", "share_expert_dims")
    beside = MLPConfig(shared_width, shape.activation, has_bias=shape.mlp_bias, clamp=shared)
    return checked_experts(text, num_experts, expert, router, beside)


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Bounds stand layer by layer, those of a shared expert apart; a layer without experts has the shared one's."""
    num_layers = config.num_layers()
    num_stored = num_layers + config.num_extra_layers()  # lists of layers have the extra ones', too
    heads = config.integers("attention.head_count", num_stored)
    kv_heads = config.integers("attention.head_count_kv", num_stored)
    shape = shape_from_gguf(
        config,
        tensor_names,
        has_partial=True,
        num_heads=heads[0],
        num_kv_heads=kv_heads[0],
        rotary=lambda dim: _gguf_full_rotary(config, dim),
        qk_norm="heads",
    )
    sliding_dim = config.integer("rope.dimension_count_swa", 2 * shape.rotary.dim)
    rotaries = {False: shape.rotary, True: config.sliding_rotary(sliding_dim, shape.rotary.theta)}
    window = config.integer("attention.sliding_window")
    slides = config.sliding_pattern(num_stored, 1)
    router = RouterConfig(scoring="sigmoid", top_k=1, has_correction=True, is_renormalised=True)
    experts = experts_from_gguf(config, router)
    layers = [
        shape.layer(
            window if slides[layer] else None,
            num_heads=heads[layer],
            num_kv_heads=kv_heads[layer],
            rotary=rotaries[slides[layer]],
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


def _gguf_full_rotary(config: ConfigGguf, dim: int) -> RotaryConfig:
    """Full layers turn half of `rope.dimension_count`, as llama.cpp has it. The converter works out divisors of whole
    heads' frequencies, of which every other one is a frequency of half a head."""
    if dim % 4:
        raise config.refuse("rope.dimension_count", "full layers turn half of it, in pairs; it must be a multiple of 4")
    return config.rotary(dim // 2, 10_000.0, divisors_dim=dim)


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
        | shared_mlp("share_expert")
        | {
            "self_attn.g_proj": "self_attn.gate_proj",
            "moe.gate": "mlp.router",
            "moe.router_bias": "mlp.router.correction",
        },
        safetensors_stacks={f"moe.{each}.weight": ExpertStack((each,)) for each in MLP_PARTS},
        prefixes=TEXT_PREFIXES,
        other_parts=TOWERS,
        gguf_layer=GGUF_LAYER | GGUF_HEAD_NORMS | {"attn_gate": "self_attn.gate_proj"},
        safetensors_norm_offset=1.0,
        gguf_norm_offset=0.0,  # its converter has added the 1 already
    ),
)
