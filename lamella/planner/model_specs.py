"""The KV specs of a model by name or file, for any model_type whose config says how its layers attend.

Planning needs only what the KV cache holds, so it is not limited to the architectures that can be run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.models.config import ModelConfig, kv_sharing, layer_specs
from lamella.model_executor.models.config_json import ConfigJson, shared_kv_owners
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.weights.demo_models import DEMO_PREFIX
from lamella.model_executor.weights.loading import load_config, resolve_model
from lamella.model_executor.weights.model_source import existing_path
from lamella.model_executor.weights.regular_files import is_there
from lamella.planner.compressed_layers import deepseek_v4_config, inkling_config
from lamella.planner.known_models import known_names, known_specs
from lamella.planner.layer_specs import LayerSpecs

# Which layers slide where config.json leaves it to transformers' code (transformers 5.24): every n-th is full.
_FULL_EVERY = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
}
_ALL_SLIDE = {"ministral", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
_SLIDE_ABOVE = {"qwen2", "qwen3"}  # from layer max_window_layers on
_MIMO = "mimo_v2_flash"
_NUM_KV_SHARED_LAYERS = {"gemma3n_text": 15}  # transformers' default where config.json leaves it out
_GEMMA_4 = {"gemma4_text", "gemma4_unified_text"}
# What these keep is more than K and V per head.
_OWN_READERS = {
    "deepseek_v4": deepseek_v4_config,
    "inkling_text": inkling_config,
    "inkling": inkling_config,
}
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def model_specs(model: str, itemsize_bytes: int) -> LayerSpecs:
    """Each layer's spec and who reads whose KV; no weights are read.

    model: a folder with config.json, a config.json, a .gguf file (or a folder with one), "demo:gemma-3-270m", or a
    name in `known_names()`.
    Raises ModelLoadError when there is no such thing, or its layers are not described in a way that is known here.
    """
    path = existing_path(model)
    if path is not None and path.is_dir() and is_there(path / "config.json"):
        path = path / "config.json"
    if path is not None and path.suffix == ".json":
        return _fields_specs(read_json_object(path), itemsize_bytes)
    if path is None and not model.startswith(DEMO_PREFIX):
        specs = known_specs(model, itemsize_bytes)
        if specs is None:
            raise ModelLoadError(
                f"model={model!r} is neither a file nor a name that is known; pass a folder with config.json, a "
                f"config.json, a .gguf file, or one of {', '.join(known_names())}"
            )
        return specs
    return _specs_of(load_config(resolve_model(model)), itemsize_bytes)


def config_specs(config: Mapping[str, Any], itemsize_bytes: int) -> LayerSpecs:
    """The layers of a config.json: by the engine's own reading where it knows the architecture, else by the keys that
    transformers' configs share. `sliding_window` counts the query itself, as transformers masks."""
    return _fields_specs(TypedFields(config, "config.json"), itemsize_bytes)


def _fields_specs(fields: TypedFields, itemsize_bytes: int) -> LayerSpecs:
    try:
        return _specs_of(parse_config(fields), itemsize_bytes)
    except ModelLoadError:
        # If the family's own reader refuses the config, the readers below report what is wrong with the fields that
        # planning needs.
        return _generic_specs(
            ConfigJson(fields.object("text_config") if fields.has_value("text_config") else fields), itemsize_bytes
        )


def _specs_of(config: ModelConfig, itemsize_bytes: int) -> LayerSpecs:
    return LayerSpecs(layer_specs(config, itemsize_bytes=itemsize_bytes), kv_sharing(config))


def _generic_specs(config: ConfigJson, itemsize_bytes: int) -> LayerSpecs:
    if config.optional_integer("kv_lora_rank"):
        raise config.refuse(
            "kv_lora_rank",
            "latent attention keeps compressed KV, which is not planned for; plan a model whose layers keep K and V "
            "per head",
        )
    reader = _OWN_READERS.get(_model_type(config))
    if reader is not None:
        return reader(config, itemsize_bytes)
    num_layers = config.integer("num_hidden_layers")
    kinds = _layer_kinds(config, num_layers)
    if _model_type(config) in _GEMMA_4:
        kinds[-1] = "full_attention"  # the last layer is always full, whatever the pattern says
    if len(kinds) != num_layers:
        raise ModelLoadError(f"{len(kinds)} layers have a kind, but num_hidden_layers is {num_layers}")
    num_shared = config.optional_integer("num_kv_shared_layers")
    if num_shared is None:
        num_shared = _NUM_KV_SHARED_LAYERS.get(_model_type(config), 0)
    own = _per_layer(config, num_layers)
    return LayerSpecs(
        [_spec(own.get(layer, config), kind, itemsize_bytes) for layer, kind in enumerate(kinds)],
        shared_kv_owners(kinds, num_shared),
    )


def _model_type(config: ConfigJson) -> str:
    return config.fields.optional_string("model_type") or ""


def _per_layer(config: ConfigJson, num_layers: int) -> dict[int, ConfigJson]:
    """The config as single layers see it: transformers 5 saves what differs in some layers (Gemma 4's wider full ones)
    as per_layer_config, {"05": {"head_dim": 512}}."""
    overrides = config.fields.optional_object("per_layer_config")
    layers = {}
    for key in overrides:
        if not (key.isascii() and key.isdigit()) or int(key[-6:]) >= num_layers:
            raise overrides.error(key, f"named after a layer, from 0 to {num_layers - 1}")
        # It decides about the heads, as in transformers, so the keys that it replaces are not read.
        own = TypedFields({"global_head_dim": None}, overrides.place).overlaid(overrides.object(key))
        layers[int(key[-6:])] = ConfigJson(config.fields.overlaid(own))
    return layers


def _layer_kinds(config: ConfigJson, num_layers: int) -> list[str]:
    fields = config.fields
    if fields.raw("layer_types") != []:
        kinds = config.layer_types(num_layers, _KINDS)
        if kinds is not None:
            return list(kinds)
    if fields.has_value("hybrid_layer_pattern"):  # MiMo-V2-Flash as published: 1 slides
        return [_kind(bool(slides)) for slides in fields.integers("hybrid_layer_pattern", high=1)]
    if config.optional_integer("attention_chunk_size"):
        return _chunked_kinds(config, num_layers)
    if not (config.optional_integer("sliding_window") or config.optional_integer("sliding_window_size")):
        return ["full_attention"] * num_layers
    return _sliding_kinds(config, num_layers)


def _chunked_kinds(config: ConfigJson, num_layers: int) -> list[str]:
    """Llama 4: the layers without rotary embedding are the full ones."""
    interval = config.optional_integer("no_rope_layer_interval") or 4
    has_rope: Sequence[int] = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if config.fields.raw("no_rope_layers"):
        has_rope = config.fields.integers("no_rope_layers", high=1)
    return ["chunked_attention" if rotates else "full_attention" for rotates in has_rope]


def _sliding_kinds(config: ConfigJson, num_layers: int) -> list[str]:
    layers = range(num_layers)
    model_type = _model_type(config)
    slides_unasked = model_type not in _SLIDE_ABOVE | {"qwen3_moe", "smollm3"}
    if not (config.boolean("use_sliding_window", slides_unasked)):
        return ["full_attention"] * num_layers
    key = next((key for key in ("sliding_window_pattern", "_sliding_window_pattern") if config.fields.raw(key)), None)
    if key is not None and isinstance(config.fields.raw(key), str):  # exaone4: "LLLG", L for local
        pattern = config.fields.string(key)
        return [_kind(pattern[layer % len(pattern)] == "L") for layer in layers]
    period = config.integer(key) if key is not None else _FULL_EVERY.get(model_type)
    if period:
        return [_kind((layer + 1) % period != 0) for layer in layers]
    if model_type == _MIMO:
        return [_kind(layer > 0 and (layer + 1) % 6 != 0) for layer in layers]
    if model_type in _SLIDE_ABOVE:
        first = config.integer("max_window_layers", 28)
        return [_kind(layer >= first) for layer in layers]
    if model_type in _ALL_SLIDE:
        return ["sliding_attention"] * num_layers
    raise config.refuse(
        "sliding_window",
        f"the config of model_type {model_type!r} does not say which layers slide; add layer_types (one of "
        f"{', '.join(_KINDS)} per layer)",
    )


def _kind(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"


def _spec(config: ConfigJson, kind: str, itemsize_bytes: int) -> KVCacheSpec:
    shape = dict(zip(("num_kv_heads", "k_dim", "v_dim"), _heads(config, kind), strict=True))
    if kind == "full_attention":
        return FullAttentionSpec(itemsize_bytes=itemsize_bytes, **shape)
    if kind == "chunked_attention":
        chunk = config.integer("attention_chunk_size")
        return ChunkedLocalAttentionSpec(attention_chunk_tokens=chunk, itemsize_bytes=itemsize_bytes, **shape)
    if _model_type(config) == _MIMO and config.optional_integer("sliding_window_size"):
        window = config.integer("sliding_window_size") + 1  # it counts previous tokens
    else:
        window = config.integer("sliding_window")
    return SlidingWindowSpec(window_tokens=window, itemsize_bytes=itemsize_bytes, **shape)


def _heads(config: ConfigJson, kind: str) -> tuple[int, int, int]:
    """KV heads, K dim and V dim of the layers of `kind`."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    k_dim = config.optional_integer("head_dim") or _even_share(config, num_heads)
    v_dim = config.optional_integer("v_head_dim") or k_dim
    if kind == "sliding_attention":
        # MiMo-V2-Flash's sliding layers have twice the heads; transformers' config does not say so, its code does.
        num_kv_heads *= 2 if _model_type(config) == _MIMO else 1
        num_kv_heads = config.optional_integer("swa_num_key_value_heads") or num_kv_heads
        k_dim = config.optional_integer("swa_head_dim") or k_dim
        v_dim = config.optional_integer("swa_v_head_dim") or v_dim
    elif kind == "full_attention" and (wide := _global_head_dim(config)):
        k_dim = v_dim = wide
        if config.boolean("attention_k_eq_v", True):
            num_kv_heads = config.optional_integer("num_global_key_value_heads") or num_kv_heads
    return num_kv_heads, k_dim, v_dim


def _even_share(config: ConfigJson, num_heads: int) -> int:
    share = config.integer("hidden_size") // num_heads
    if share < 1:
        raise config.refuse("hidden_size", f"{num_heads} attention heads cannot share it; give head_dim")
    return share


def _global_head_dim(config: ConfigJson) -> int | None:
    if "global_head_dim" not in config:
        return 512 if _model_type(config) in _GEMMA_4 else None
    return config.optional_integer("global_head_dim")
