"""Configs of families as lamella parses them, beside those that transformers makes of the same fields."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields


def parsed(architecture: str, **fields: Any) -> ModelConfig:
    """architecture: as transformers' classes begin."""
    return parse_config(TypedFields({"architectures": [f"{architecture}ForCausalLM"], **fields}, "config.json"))


def kinds(config: ModelConfig) -> list[str]:
    return [layer.attention.kind for layer in config.layers]


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window_tokens for layer in config.layers]


def check_defaults(architecture: str, class_name: str | None = None, **fields: Any) -> tuple[ModelConfig, Any]:
    """Hold what every config has against transformers', with `fields` and nothing else given. Returns both."""
    import transformers

    ours = parsed(architecture, **fields)
    theirs = getattr(transformers, f"{class_name or architecture}Config")(**fields)
    eps = next(
        getattr(theirs, name) for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon") if hasattr(theirs, name)
    )
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
    )
    assert ours.norm_eps == eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    end = theirs.eos_token_id
    assert ours.eos_token_ids == tuple(end if isinstance(end, list) else [] if end is None else [end])
    for layer in ours.layers:
        assert (layer.attention.num_heads, layer.attention.num_kv_heads) == (
            theirs.num_attention_heads,
            theirs.num_key_value_heads,
        )
        assert layer.attention.k_dim == layer.attention.v_dim == head_dim
    if getattr(theirs, "layer_types", None):
        assert kinds(ours) == theirs.layer_types
        for kind, window in zip(kinds(ours), windows(ours), strict=True):
            assert window == (theirs.sliding_window if kind == "sliding_attention" else None)
    return ours, theirs


def check_refused(architecture: str, told: str, **fields: Any) -> None:
    with pytest.raises(ModelLoadError, match=told):
        parsed(architecture, **fields)
