"""What planning needs to know of a model: the KV spec of each layer, and which layers read another's KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamella.kv_cache.layout import KVLayout, build_layout, without_sliding
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class LayerSpecs:
    """specs: one per layer. kv_sharing: layer -> the layer whose KV it reads, for layers that keep none."""

    specs: Sequence[KVCacheSpec]
    kv_sharing: Mapping[int, int] = field(default_factory=dict)

    def layout(self, page_tokens: int) -> KVLayout:
        return build_layout(self.specs, page_tokens=page_tokens, kv_sharing=self.kv_sharing)

    def uniform_layout(self, page_tokens: int) -> KVLayout:
        """The layout with every owner's KV kept like a full layer's."""
        return build_layout(without_sliding(self.specs), page_tokens=page_tokens, kv_sharing=self.kv_sharing)
