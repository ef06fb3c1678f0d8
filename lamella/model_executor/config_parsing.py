"""A Hugging Face config.json as a ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.model_config import LayerConfig, ModelConfig

KNOWN_ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration (its text model)")
_TEXT_NAMES = {"gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel"}
_MULTIMODAL_NAMES = {"gemma3", "Gemma3ForConditionalGeneration"}
_DTYPES = ("float32", "float16", "bfloat16")

# What transformers' Gemma3TextConfig fills in; multimodal checkpoints leave most of these out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. Raises ModelLoadError when it is not there or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, read as transformers reads it; `generation_config`'s end tokens win.

    Raises ModelLoadError for an architecture, or a variant of it, that is not built here.
    """
    text = _text_config(config)
    values = {**_DEFAULTS, **{key: value for key, value in text.items() if value is not None}}
    # None means something here: no window at all, no token.
    for key in ("sliding_window", "bos_token_id", "eos_token_id"):
        if key in text:
            values[key] = text[key]
    _refuse_variants(text, values)
    num_layers = _positive(values, "num_hidden_layers")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "")
    dtype = dtype.removeprefix("torch.") or "float32"
    if dtype not in _DTYPES:
        raise ModelLoadError(f"config.json says dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    tied = config["tie_word_embeddings"] if config.get("tie_word_embeddings") is not None else None
    return ModelConfig(
        architecture="gemma3",
        vocab_size=_positive(values, "vocab_size"),
        hidden_size=_positive(values, "hidden_size"),
        intermediate_size=_positive(values, "intermediate_size"),
        num_heads=_positive(values, "num_attention_heads"),
        num_kv_heads=_positive(values, "num_key_value_heads"),
        head_dim=_positive(values, "head_dim"),
        rms_norm_eps=float(values["rms_norm_eps"]),
        max_position_embeddings=_positive(values, "max_position_embeddings"),
        query_scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        layers=_layers(values, num_layers),
        tie_word_embeddings=bool(values["tie_word_embeddings"] if tied is None else tied),
        attn_logit_softcap=_optional_float(text.get("attn_logit_softcapping")),
        final_logit_softcap=_optional_float(text.get("final_logit_softcapping")),
        bos_token_id=config.get("bos_token_id", values["bos_token_id"]),
        eos_token_ids=_end_tokens(generation_config, config, values),
        dtype=dtype,
    )


def shared_kv_owners(layer_types: Sequence[str], num_shared_layers: int) -> dict[int, int]:
    """Layer -> the layer whose KV it reads, where the last `num_shared_layers` layers have none of their own.

    The rule of Gemma 3n and Gemma 4 (`num_kv_shared_layers`): each of them reads the last earlier layer of its kind
    that has KV. In transformers 5.24 this is `kv_sharing_modes` of configuration_gemma3n.py and
    configuration_gemma4.py, where the last layer of each kind before the shared ones "stores" its K and V, and the
    attention's forward, where a layer that "reuses" takes what its `layer_type` stored. With Gemma 3n E4B's 35 layers
    of which every fifth is full, layers 20 to 34 share: the sliding ones read layer 18, the full ones layer 19.
    Raises ModelLoadError when a shared layer has no earlier layer of its kind that keeps KV.
    """
    num_layers = len(layer_types)
    if isinstance(num_shared_layers, bool) or not isinstance(num_shared_layers, int) or num_shared_layers < 0:
        raise ModelLoadError(
            f"num_kv_shared_layers={num_shared_layers!r} in config.json: must be an integer of at least 0"
        )
    if num_shared_layers >= num_layers:
        raise ModelLoadError(
            f"num_kv_shared_layers={num_shared_layers} in config.json, of {num_layers} layers: no layer keeps KV, as "
            "in an assistant that reads another model's; use the model it assists"
        )
    num_own = num_layers - num_shared_layers
    last_of_kind = {kind: layer for layer, kind in enumerate(layer_types[:num_own])}
    for layer in range(num_own, num_layers):
        if layer_types[layer] not in last_of_kind:
            raise ModelLoadError(
                f"num_kv_shared_layers={num_shared_layers} in config.json: layer {layer} is {layer_types[layer]!r}, "
                f"but no layer before {num_own} is, whose KV it could read; share fewer layers"
            )
    return {layer: last_of_kind[layer_types[layer]] for layer in range(num_own, num_layers)}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [name for name in (*(config.get("architectures") or ()), config.get("model_type")) if name]
    for name in names:
        if name in _TEXT_NAMES:
            return config
        if name in _MULTIMODAL_NAMES:
            text = config.get("text_config")
            if not isinstance(text, Mapping):
                raise ModelLoadError(
                    f"config.json is for {name} but has no text_config, which describes the text model"
                )
            return text
    raise ModelLoadError(
        f"architecture {names[0] if names else '(none named in config.json)'} is not known; "
        f"known: {', '.join(KNOWN_ARCHITECTURES)}"
    )


def _refuse_variants(text: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if text.get("use_bidirectional_attention"):
        raise ModelLoadError(
            "use_bidirectional_attention is true: this is an encoder, and only causal models can generate; "
            "use the model it was made from"
        )
    if text.get("attention_bias"):
        raise ModelLoadError("attention_bias is true: Gemma 3 layers are built without biases")
    if text.get("num_kv_shared_layers"):
        raise ModelLoadError(
            f"num_kv_shared_layers={text['num_kv_shared_layers']}: Gemma 3 is built with K and V in every layer; "
            "use a checkpoint in which each layer has its own"
        )
    if values["hidden_activation"] != "gelu_pytorch_tanh":
        raise ModelLoadError(
            f"hidden_activation={values['hidden_activation']!r} is not built; Gemma 3 uses gelu_pytorch_tanh"
        )
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ModelLoadError(
            f"{values['num_attention_heads']} attention heads cannot share {values['num_key_value_heads']} key-value "
            "heads evenly; one must divide the other"
        )


def _positive(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{key}={value!r} in config.json: must be a positive integer")
    return value


def _optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _layers(values: Mapping[str, Any], num_layers: int) -> tuple[LayerConfig, ...]:
    kinds = values.get("layer_types")
    if kinds is None:
        # transformers saves the old key with an underscore.
        pattern = int(values.get("_sliding_window_pattern") or values["sliding_window_pattern"])
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(
            f"layer_types has {', '.join(map(repr, unknown))}; known: 'full_attention', 'sliding_attention'"
        )
    ropes = {kind: _rope(values, kind) for kind in set(kinds)}
    # transformers masks 0 <= q - k < sliding_window for Gemma 3: the query itself is counted already.
    windows: dict[str, int | None] = {"full_attention": None}
    if "sliding_attention" in kinds:
        windows["sliding_attention"] = _positive(values, "sliding_window")
    return tuple(LayerConfig(kind, windows[kind], *ropes[kind]) for kind in kinds)


def _rope(values: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """(theta, position divisor) of the layers of `kind`. The old scaling keys speak of full layers only."""
    nested = values.get("rope_parameters") or {}
    if nested and not set(nested) & {"full_attention", "sliding_attention"}:
        raise ModelLoadError(
            "rope_parameters must be given per layer type for Gemma 3, as {'full_attention': {...}, ...}"
        )
    rope = dict(nested.get(kind) or {})
    if kind == "full_attention":
        rope.update(values.get("rope_scaling") or {})
        theta = rope.get("rope_theta", values.get("rope_theta", 1_000_000.0))
    else:
        theta = rope.get("rope_theta", values.get("rope_local_base_freq", 10_000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "linear"):
        raise ModelLoadError(f"rope type {rope_type!r} of the {kind} layers is not built; known: default, linear")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError("partial_rotary_factor is set: Gemma 3 is built with whole heads rotated")
    factor = float(rope.get("factor", 1.0)) if rope_type == "linear" else 1.0
    if factor <= 0:
        raise ModelLoadError(f"rope factor {factor} of the {kind} layers: must be positive")
    return float(theta), factor


def _end_tokens(
    generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[int, ...]:
    for place in (generation_config or {}, config, values):
        found = place.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (found,)
    return ()
