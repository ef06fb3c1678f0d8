"""The KV specs of a model by name or file, for any model_type whose config says how its layers attend.

Planning needs only what the KV cache holds, so it is not limited to the architectures that can be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.config_parsing import parse_config, read_json, shared_kv_owners
from lamella.model_executor.demo_models import DEMO_PREFIX
from lamella.model_executor.loading import load_config, resolve_model
from lamella.model_executor.model_config import ModelConfig, kv_sharing, layer_specs
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
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def model_specs(model: str, itemsize_bytes: int) -> LayerSpecs:
    """Each layer's spec and who reads whose KV; no weights are read.

    model: a folder with config.json, a config.json, a .gguf file (or a folder with one), "demo:gemma-3-270m", or a
    name in `known_names()`.
    Raises ModelLoadError when there is no such thing, or its layers are not described in a way that is known here.
    """
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() and path.suffix == ".json":
        return config_specs(read_json(path), itemsize_bytes)
    if not path.exists() and not model.startswith(DEMO_PREFIX):
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
    try:
        return _specs_of(parse_config(config), itemsize_bytes)
    except ModelLoadError:
        text = config.get("text_config")
        values = text if isinstance(text, Mapping) else config
        return _generic_specs(values, itemsize_bytes)


def _specs_of(config: ModelConfig, itemsize_bytes: int) -> LayerSpecs:
    return LayerSpecs(layer_specs(config, itemsize_bytes=itemsize_bytes), kv_sharing(config))


def _generic_specs(values: Mapping[str, Any], itemsize_bytes: int) -> LayerSpecs:
    if values.get("kv_lora_rank"):
        raise ModelLoadError(
            f"kv_lora_rank={values['kv_lora_rank']} in config.json: latent attention keeps compressed KV, which is not "
            "planned for; plan a model whose layers keep K and V per head"
        )
    num_layers = _positive(values, "num_hidden_layers")
    kinds = _layer_kinds(values, num_layers)
    if values.get("model_type") in _GEMMA_4:
        kinds[-1] = "full_attention"  # whatever the pattern says
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - set(_KINDS))
    if unknown:
        raise ModelLoadError(
            f"layer_types has {', '.join(map(repr, unknown))}, whose cache is not K and V of tokens; known: "
            f"{', '.join(_KINDS)}"
        )
    num_shared = values.get("num_kv_shared_layers")
    if num_shared is None:
        num_shared = _NUM_KV_SHARED_LAYERS.get(str(values.get("model_type")), 0)
    return LayerSpecs(
        [_spec(_layer_values(values, layer), kind, itemsize_bytes) for layer, kind in enumerate(kinds)],
        shared_kv_owners(kinds, num_shared),
    )


def _layer_values(values: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """The config as one layer sees it: transformers 5 saves what differs in some layers (Gemma 4's wider full ones)
    as per_layer_config, {"05": {"head_dim": 512}}."""
    overrides = values.get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return values
    own: Mapping[str, Any] = next((own for key, own in overrides.items() if int(key) == layer), {})
    # It has the last word on the heads, as in transformers, so the keys that it came from are not read again.
    return {**values, **own, "global_head_dim": None}


def _layer_kinds(values: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = values.get("layer_types")
    if kinds:
        return list(kinds)
    if values.get("hybrid_layer_pattern"):  # MiMo-V2-Flash as published: 1 slides
        return [_kind(bool(slides)) for slides in values["hybrid_layer_pattern"]]
    if values.get("attention_chunk_size"):
        return _chunked_kinds(values, num_layers)
    if not (values.get("sliding_window") or values.get("sliding_window_size")):
        return ["full_attention"] * num_layers
    return _sliding_kinds(values, num_layers)


def _chunked_kinds(values: Mapping[str, Any], num_layers: int) -> list[str]:
    """Llama 4: the layers without rotary embedding are the full ones."""
    interval = int(values.get("no_rope_layer_interval") or 4)
    has_rope = values.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    return ["chunked_attention" if rotates else "full_attention" for rotates in has_rope]


def _sliding_kinds(values: Mapping[str, Any], num_layers: int) -> list[str]:
    layers = range(num_layers)
    model_type = str(values.get("model_type"))
    if not values.get("use_sliding_window", model_type not in _SLIDE_ABOVE | {"qwen3_moe", "smollm3"}):
        return ["full_attention"] * num_layers
    pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern")
    if isinstance(pattern, str):  # exaone4: "LLLG", L for local
        return [_kind(pattern[layer % len(pattern)] == "L") for layer in layers]
    period = pattern or _FULL_EVERY.get(model_type)
    if period:
        return [_kind((layer + 1) % int(period) != 0) for layer in layers]
    if model_type == _MIMO:
        return [_kind(layer > 0 and (layer + 1) % 6 != 0) for layer in layers]
    if model_type in _SLIDE_ABOVE:
        first = int(values.get("max_window_layers", 28))
        return [_kind(layer >= first) for layer in layers]
    if model_type in _ALL_SLIDE:
        return ["sliding_attention"] * num_layers
    raise ModelLoadError(
        f"config.json of model_type {model_type!r} has sliding_window={values.get('sliding_window')!r}, but does not "
        "say which layers slide; add layer_types (one of "
        f"{', '.join(_KINDS)} per layer)"
    )


def _kind(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"


def _spec(values: Mapping[str, Any], kind: str, itemsize_bytes: int) -> KVCacheSpec:
    shape = dict(zip(("num_kv_heads", "k_dim", "v_dim"), _heads(values, kind), strict=True))
    if kind == "full_attention":
        return FullAttentionSpec(itemsize_bytes=itemsize_bytes, **shape)
    if kind == "chunked_attention":
        chunk = _positive(values, "attention_chunk_size")
        return ChunkedLocalAttentionSpec(attention_chunk_tokens=chunk, itemsize_bytes=itemsize_bytes, **shape)
    if values.get("model_type") == _MIMO and values.get("sliding_window_size"):
        window = _positive(values, "sliding_window_size") + 1  # it counts previous tokens
    else:
        window = _positive(values, "sliding_window")
    return SlidingWindowSpec(window_tokens=window, itemsize_bytes=itemsize_bytes, **shape)


def _heads(values: Mapping[str, Any], kind: str) -> tuple[int, int, int]:
    """KV heads, K dim and V dim of the layers of `kind`."""
    is_gemma_4 = values.get("model_type") in _GEMMA_4
    num_heads = _positive(values, "num_attention_heads")
    num_kv_heads = _positive(values, "num_key_value_heads", num_heads)
    k_dim = values.get("head_dim") or _positive(values, "hidden_size") // num_heads
    v_dim = values.get("v_head_dim") or k_dim
    if kind == "sliding_attention":
        # MiMo-V2-Flash's sliding layers have twice the heads; transformers' config does not say so, its code does.
        num_kv_heads *= 2 if values.get("model_type") == _MIMO else 1
        num_kv_heads = values.get("swa_num_key_value_heads") or num_kv_heads
        k_dim = values.get("swa_head_dim") or k_dim
        v_dim = values.get("swa_v_head_dim") or v_dim
    elif kind == "full_attention" and (wide := values.get("global_head_dim", 512 if is_gemma_4 else None)):
        k_dim = v_dim = wide
        if values.get("attention_k_eq_v", True):
            num_kv_heads = values.get("num_global_key_value_heads") or num_kv_heads
    return num_kv_heads, k_dim, v_dim


def _positive(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{key}={value!r} in config.json: must be a positive integer")
    return value
