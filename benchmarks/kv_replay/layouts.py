"""KV layouts of the models whose traffic is replayed: one spec per layer, bf16."""

from __future__ import annotations

from typing import NamedTuple

from lamella.errors import ConfigError
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

BF16_BYTES = 2


class _Shape(NamedTuple):
    """A full layer at the end of each `period` layers, `num_full` in all; the other layers slide."""

    num_layers: int
    period: int
    num_full: int
    window_tokens: int
    full_heads: int
    sliding_heads: int
    k_dim: int
    v_dim: int


_SHAPES = {
    "gpt-oss-20b": _Shape(24, 2, 12, 128, 8, 8, 64, 64),
    "gemma-3-27b": _Shape(62, 6, 10, 1024, 16, 16, 128, 128),
    "mimo-v2-flash": _Shape(48, 5, 9, 128, 4, 8, 192, 128),
    "gemma-3-270m": _Shape(18, 6, 3, 512, 1, 1, 256, 256),
}
LAYOUTS = tuple(_SHAPES)


def layer_specs(name: str) -> list[KVCacheSpec]:
    """One spec per layer. Raises ConfigError for a name that is not in LAYOUTS."""
    if name not in _SHAPES:
        raise ConfigError(f"layout={name!r} is not known; choose one of {', '.join(LAYOUTS)}")
    shape = _SHAPES[name]
    dims = {"k_dim": shape.k_dim, "v_dim": shape.v_dim, "itemsize_bytes": BF16_BYTES}
    full = FullAttentionSpec(num_kv_heads=shape.full_heads, **dims)
    sliding = SlidingWindowSpec(num_kv_heads=shape.sliding_heads, window_tokens=shape.window_tokens, **dims)
    full_layers = {shape.period * (index + 1) - 1 for index in range(shape.num_full)}
    return [full if layer in full_layers else sliding for layer in range(shape.num_layers)]


def full_token_bytes(specs: list[KVCacheSpec]) -> int:
    """Bytes that one token takes in all full-attention layers."""
    return sum(spec.token_bytes for spec in specs if not spec.is_windowed)
