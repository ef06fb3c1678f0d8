"""The metadata of a Gemma 3 GGUF file as a ModelConfig."""

from __future__ import annotations

from typing import Any

import numpy as np

from lamella.errors import ModelLoadError
from lamella.model_executor.gguf_files import GgufHeader, SkippedStrings, read_gguf_header
from lamella.model_executor.model_config import LayerConfig, ModelConfig

KNOWN_GGUF_ARCHITECTURES = ("gemma3",)
TOKENS_KEY = "tokenizer.ggml.tokens"
_SLIDING_PATTERN = 6  # files seldom state it: every sixth layer is full
_LOCAL_ROPE_THETA = 10_000.0
_LAYERS_OF_27B = 62
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_END = "<end_of_turn>"


def parse_gguf_config(header: GgufHeader) -> ModelConfig:
    """The ModelConfig of `header`. Raises ModelLoadError: unknown architecture, missing or unusable keys."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in KNOWN_GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: architecture {architecture!r} is not known; known: {', '.join(KNOWN_GGUF_ARCHITECTURES)}"
        )
    num_layers = _integer(header, "block_count")
    hidden_size = _integer(header, "embedding_length")
    num_heads = _integer(header, "attention.head_count")
    head_dim = _integer(header, "attention.key_length")
    if _integer(header, "attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{header.path}: key and value heads differ in length, which Gemma 3 is not built with")
    # GGUF does not store query_pre_attn_scalar. It is head_dim, except hidden_size / num_heads in the 27B model
    # (google/gemma-3-27b: 168 with head_dim 128).
    query_scalar = hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim
    return ModelConfig(
        architecture="gemma3",
        vocab_size=_vocab_size(header),
        hidden_size=hidden_size,
        intermediate_size=_integer(header, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_integer(header, "attention.head_count_kv"),
        head_dim=head_dim,
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        max_position_embeddings=_integer(header, "context_length"),
        query_scale=query_scalar**-0.5,
        layers=_layers(header, num_layers),
        tie_word_embeddings="output.weight" not in header.tensors,
        attn_logit_softcap=_optional_number(header, "attn_logit_softcapping"),
        final_logit_softcap=_optional_number(header, "final_logit_softcapping"),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(header),
        dtype=_dtype(header),
    )


def _value(header: GgufHeader, key: str) -> Any:
    return header.metadata.get(f"{header.metadata['general.architecture']}.{key}")


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = _value(header, key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{header.path}: metadata {key} is {value!r}; must be a positive integer")
    return value


def _optional_number(header: GgufHeader, key: str) -> float | None:
    value = _value(header, key)
    if value is not None and not isinstance(value, (int, float)):
        raise ModelLoadError(f"{header.path}: metadata {key} is {value!r}; must be a number")
    return None if value is None else float(value)


def _number(header: GgufHeader, key: str) -> float:
    value = _optional_number(header, key)
    if value is None:
        raise ModelLoadError(f"{header.path}: metadata {key} is missing")
    return value


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = header.metadata.get(TOKENS_KEY)
    if tokens is None:
        raise ModelLoadError(f"{header.path} has neither token_embd.weight nor a vocabulary")
    return tokens.length if isinstance(tokens, SkippedStrings) else len(tokens)


def _layers(header: GgufHeader, num_layers: int) -> tuple[LayerConfig, ...]:
    window_tokens = _integer(header, "attention.sliding_window")
    theta = _optional_number(header, "rope.freq_base") or 1_000_000.0
    local_theta = _optional_number(header, "rope.freq_base_swa") or _LOCAL_ROPE_THETA
    rope_type = _value(header, "rope.scaling.type") or "none"
    if rope_type not in ("none", "linear"):
        raise ModelLoadError(f"{header.path}: rope scaling {rope_type!r} is not built; known: none, linear")
    factor = (_optional_number(header, "rope.scaling.factor") or 1.0) if rope_type == "linear" else 1.0
    sliding = LayerConfig("sliding_attention", window_tokens, local_theta)
    full = LayerConfig("full_attention", None, theta, factor)
    pattern = _value(header, "attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if len(pattern) != num_layers:
            raise ModelLoadError(
                f"{header.path}: sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        return tuple(sliding if slides else full for slides in pattern)
    period = pattern or _SLIDING_PATTERN
    return tuple(full if (layer + 1) % period == 0 else sliding for layer in range(num_layers))


def _end_tokens(header: GgufHeader) -> tuple[int, ...]:
    ids = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    if _TURN_END in header.metadata.get("tokenizer.chat_template", ""):
        # A chat model ends its turn with this token; many files name <eos> alone.
        tokens = read_gguf_header(header.path, string_arrays=(TOKENS_KEY,)).metadata.get(TOKENS_KEY, [])
        ids.append(tokens.index(_TURN_END) if _TURN_END in tokens else None)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _dtype(header: GgufHeader) -> str:
    # Quantised weights have no dtype of their own; norms are always float32.
    types = {tensor.type_id for tensor in header.tensors.values()}
    half, bfloat = 1, 30
    if types <= {0, half, bfloat}:
        return "bfloat16" if bfloat in types else "float16" if half in types else "float32"
    return "float32"
