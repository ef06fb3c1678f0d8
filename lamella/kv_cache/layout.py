"""How layers share the arena: groups of equal specs, the unit, and the slab.

Groups differ in page bytes, and nothing is padded to hide that. The *unit* is the greatest common
divisor of the groups' page bytes, so a page id (byte offset divided by the unit) means the same in
every group. A *slab* is the run of units that the arena lends to one group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.errors import ConfigError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

MAX_SLAB_WASTE = 0.01
MAX_SLAB_PAGES = 64  # of the widest group: a larger slab moves between groups too rarely


@dataclass(frozen=True, slots=True)
class KVGroup:
    """All layers with an equal spec. One block table per request serves them all.

    A page holds one block of every layer, layer after layer: layer `layers[i]` starts
    i * page_tokens * spec.token_bytes into the page.
    """

    name: str
    spec: KVCacheSpec
    layers: tuple[int, ...]
    page_bytes: int
    page_units: int
    pages_per_slab: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    page_tokens: int
    unit_bytes: int
    slab_units: int
    groups: tuple[KVGroup, ...]

    @property
    def slab_bytes(self) -> int:
        return self.slab_units * self.unit_bytes

    def slab_waste(self, group: KVGroup) -> float:
        """Share of a slab that `group` cannot use."""
        return 1 - group.pages_per_slab * group.page_units / self.slab_units

    def layer_address(self, layer: int) -> tuple[int, int]:
        """(group index, byte offset of the layer inside that group's page)."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                offset_tokens = group.layers.index(layer) * self.page_tokens
                return index, offset_tokens * group.spec.token_bytes
        raise KeyError(f"layer {layer} is in no group")


def build_layout(specs: Sequence[KVCacheSpec], *, page_tokens: int) -> KVLayout:
    """Group equal specs (in order of first appearance) and choose unit and slab.

    specs: one per layer. Raises ConfigError when there is no layer or `page_tokens` is not positive.
    """
    if not specs:
        raise ConfigError("a model without attention layers has no KV cache; at least one layer spec is needed")
    if page_tokens < 1:
        raise ConfigError(f"page_size={page_tokens}: must be a positive number of tokens")
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    page_bytes = {spec: page_tokens * spec.token_bytes * len(layers) for spec, layers in layers_of.items()}
    unit_bytes = math.gcd(*page_bytes.values())
    page_units = {spec: size // unit_bytes for spec, size in page_bytes.items()}
    slab_units = _choose_slab_units(list(page_units.values()))
    names = _names(list(layers_of))
    groups = tuple(
        KVGroup(
            name=names[index],
            spec=spec,
            layers=tuple(layers),
            page_bytes=page_bytes[spec],
            page_units=page_units[spec],
            pages_per_slab=slab_units // page_units[spec],
        )
        for index, (spec, layers) in enumerate(layers_of.items())
    )
    return KVLayout(page_tokens=page_tokens, unit_bytes=unit_bytes, slab_units=slab_units, groups=groups)


def _choose_slab_units(page_units: list[int]) -> int:
    """The smallest multiple of the widest page that wastes under 1 % of a slab in every group; where
    none is small enough, the one that wastes least."""
    widest = max(page_units)

    def waste(slab: int) -> float:
        return max(slab % units / slab for units in page_units)

    candidates = [widest * count for count in range(1, MAX_SLAB_PAGES + 1)]
    return next((slab for slab in candidates if waste(slab) < MAX_SLAB_WASTE), min(candidates, key=waste))


def _names(specs: list[KVCacheSpec]) -> list[str]:
    names: list[str] = []
    for spec in specs:
        if isinstance(spec, SlidingWindowSpec):
            base = f"sliding_{spec.window_tokens}"
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            base = f"chunked_{spec.attention_chunk_tokens}"
        else:
            base = "full"
        taken = sum(name == base or name.startswith(base + "#") for name in names)
        names.append(base if not taken else f"{base}#{taken + 1}")
    return names


def without_sliding(specs: Sequence[KVCacheSpec]) -> list[KVCacheSpec]:
    """The same layers with KV kept for the request's whole life (`disable_hybrid_kv_cache`).

    Only storage changes: attention still masks by each layer's own window.
    """
    return [
        FullAttentionSpec(
            num_kv_heads=spec.num_kv_heads, k_dim=spec.k_dim, v_dim=spec.v_dim, itemsize_bytes=spec.itemsize_bytes
        )
        for spec in specs
    ]
