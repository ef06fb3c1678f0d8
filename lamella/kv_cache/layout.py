"""How layers share the arena: groups of equal specs, the unit, and the slab.

Groups differ in page bytes, and nothing is padded to hide that. The *unit* is the greatest common
divisor of what one block takes in one layer of each group, so a page id (byte offset divided by the unit)
means the same in every group, and an id can name a place inside a page too (see `step_pages`). A *slab* is the
run of units that the arena lends to one group at a time.

A layer may have no KV of its own and read an earlier layer's instead. Such a layer is in no page: memory, tables and
capacity are those of the layers that keep KV, the *owners*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamella.errors import ConfigError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

MAX_SLAB_WASTE = 0.01
MAX_SLAB_PAGES = 64  # of the widest group; a larger slab would rarely be empty, and so rarely change groups


@dataclass(frozen=True, slots=True)
class KVGroup:
    """All layers with an equal spec that keep KV. One block table per request serves them all.

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
    """Where everything lies. owners[i]: the layer whose KV layer i reads; i itself if it keeps its own."""

    page_tokens: int
    unit_bytes: int
    slab_units: int
    groups: tuple[KVGroup, ...]
    owners: tuple[int, ...]

    @property
    def slab_bytes(self) -> int:
        return self.slab_units * self.unit_bytes

    def slab_waste(self, group: KVGroup) -> float:
        """Share of a slab that `group` cannot use."""
        return 1 - group.pages_per_slab * group.page_units / self.slab_units

    def layer_address(self, layer: int) -> tuple[int, int]:
        """(group index, byte offset inside that group's page) of the KV that the layer reads, its own or its owner's.

        Raises KeyError for a layer that the model does not have.
        """
        if not 0 <= layer < len(self.owners):
            raise KeyError(f"layer {layer} is in no group")
        owner = self.owners[layer]
        index = next(index for index, group in enumerate(self.groups) if owner in group.layers)
        group = self.groups[index]
        return index, group.layers.index(owner) * self.page_tokens * group.spec.token_bytes

    def is_shared(self, layer: int) -> bool:
        """Whether the layer reads another layer's KV and keeps none."""
        return self.owners[layer] != layer


def build_layout(
    specs: Sequence[KVCacheSpec], *, page_tokens: int, kv_sharing: Mapping[int, int] | None = None
) -> KVLayout:
    """Group equal specs (in order of first appearance) and choose unit and slab.

    specs: one per layer. kv_sharing: layer -> the earlier layer whose KV it reads, for layers that keep none.
    Raises ConfigError when there is no layer, when `page_tokens` is not positive, or when `kv_sharing` names an owner
    that is not an earlier layer of an equal spec with KV of its own.
    """
    if not specs:
        raise ConfigError("a model without attention layers has no KV cache; at least one layer spec is needed")
    if page_tokens < 1:
        raise ConfigError(f"page_size={page_tokens}: must be a positive number of tokens")
    owners = _owners(specs, kv_sharing or {})
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if owners[layer] == layer:
            layers_of.setdefault(spec, []).append(layer)
    page_bytes = {spec: page_tokens * spec.token_bytes * len(layers) for spec, layers in layers_of.items()}
    unit_bytes = math.gcd(*(page_tokens * spec.token_bytes for spec in layers_of))
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
    return KVLayout(page_tokens=page_tokens, unit_bytes=unit_bytes, slab_units=slab_units, groups=groups, owners=owners)


def _owners(specs: Sequence[KVCacheSpec], kv_sharing: Mapping[int, int]) -> tuple[int, ...]:
    for layer, owner in kv_sharing.items():
        given = f"kv_sharing={{{layer}: {owner}}}"
        if not (0 <= layer < len(specs) and 0 <= owner < len(specs)):
            raise ConfigError(
                f"{given}: the model has layers 0 to {len(specs) - 1} only; name a layer and its owner among them"
            )
        if owner >= layer:
            raise ConfigError(
                f"{given}: when layer {layer} runs, layer {owner} has not written its KV yet; name an earlier layer"
            )
        if owner in kv_sharing:
            raise ConfigError(
                f"{given}: layer {owner} keeps no KV, it reads layer {kv_sharing[owner]}'s; name a layer that keeps "
                "its own"
            )
        if specs[layer] != specs[owner]:
            raise ConfigError(
                f"{given}: layer {layer} wants {specs[layer]}, but layer {owner} keeps {specs[owner]}; name a layer of "
                "an equal spec"
            )
    return tuple(kv_sharing.get(layer, layer) for layer in range(len(specs)))


def _choose_slab_units(page_units: list[int]) -> int:
    """The smallest multiple of the widest page that wastes under 1 % of a slab in every group. If no multiple up to
    MAX_SLAB_PAGES does, the one that wastes least."""
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

    Only storage changes: attention still masks by each layer's own window, and who shares whose KV stays as it is.
    """
    return [
        FullAttentionSpec(
            num_kv_heads=spec.num_kv_heads, k_dim=spec.k_dim, v_dim=spec.v_dim, itemsize_bytes=spec.itemsize_bytes
        )
        for spec in specs
    ]
