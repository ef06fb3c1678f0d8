"""What is known of published architectures that declare how their layers attend: one entry per model_type.

The entries stand in architectures.json beside this file, as `tests/helpers/models_page.py` finds them by walking
transformers' configs and recording their attention calls. Whether lamella has a family of its own for an architecture
is not in there: the registry of families says so (`model_executor/models/registry.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.planner.layer_specs import LayerSpecs

ARCHITECTURES = Path(__file__).with_name("architectures.json")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer by its config. kind: as transformers calls it. window_tokens: keys seen, the query's own included; None:
    all. num_heads, k_dim, v_dim: of attention, for its operations."""

    kind: str
    window_tokens: int | None
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int

    def spec(self, itemsize_bytes: int) -> KVCacheSpec:
        shape = dict(num_kv_heads=self.num_kv_heads, k_dim=self.k_dim, v_dim=self.v_dim, itemsize_bytes=itemsize_bytes)
        if self.window_tokens is None:
            return FullAttentionSpec(**shape)
        if self.kind == "chunked_attention":
            return ChunkedLocalAttentionSpec(attention_chunk_tokens=self.window_tokens, **shape)
        return SlidingWindowSpec(window_tokens=self.window_tokens, **shape)

    def flops(self, context_tokens: int) -> int:
        """Multiplications and additions of one token's attention at the end of a context: q.k and the weighted sum of
        values, over the keys that it sees at most."""
        num_keys = context_tokens if self.window_tokens is None else min(context_tokens, self.window_tokens)
        return 2 * self.num_heads * (self.k_dim + self.v_dim) * num_keys


@dataclass(frozen=True, slots=True)
class Architecture:
    """kinds: of all layers, in order. refusal: why transformers' backend does not run it; None: it does. layers: empty
    where they keep more than K and V, so that no spec describes them."""

    model_type: str
    kinds: Sequence[str]
    layers: Sequence[LayerShape]
    kv_sharing: Mapping[int, int] = field(default_factory=dict)
    refusal: str | None = None

    def layer_specs(self, itemsize_bytes: int) -> LayerSpecs:
        return LayerSpecs([layer.spec(itemsize_bytes) for layer in self.layers], self.kv_sharing)


@cache
def architectures() -> tuple[Architecture, ...]:
    """All entries, by model_type."""
    entries: list[dict[str, Any]] = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    return tuple(_architecture(entry) for entry in entries)


def _architecture(entry: Mapping[str, Any]) -> Architecture:
    shapes = [LayerShape(**shape) for shape in entry["shapes"]]
    return Architecture(
        model_type=entry["model_type"],
        kinds=_expanded(entry["kinds"]),
        layers=[shapes[index] for index in _expanded(entry["layers"])],
        kv_sharing={int(layer): owner for layer, owner in entry["kv_sharing"].items()},
        refusal=entry["refusal"],
    )


def _expanded(runs: Sequence[Sequence[Any]]) -> list[Any]:
    """[[value, times], ...] -> the values one after the other."""
    return [value for value, times in runs for _ in range(times)]
