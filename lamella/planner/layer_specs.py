"""What planning needs to know of a model: the KV spec of each layer, and which layers read another's KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamella.kv_cache.layout import KVLayout, build_layout, without_sliding
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class LayerSpecs:
    """specs: one per layer, and one more for each layer that keeps something beside a window (compressed keys).
    kv_sharing: layer -> the layer whose KV it reads, for layers that keep none. default_ratio: the ratio of fixed pools
    to plan with where none is given; None: several are compared."""

    specs: Sequence[KVCacheSpec]
    kv_sharing: Mapping[int, int] = field(default_factory=dict)
    default_ratio: float | None = None

    def layout(self, page_tokens: int) -> KVLayout:
        return build_layout(self.specs, page_tokens=page_tokens, kv_sharing=self.kv_sharing)

    def uniform_layout(self, page_tokens: int) -> KVLayout:
        """The layout with every owner's KV kept like a full layer's."""
        return build_layout(without_sliding(self.specs), page_tokens=page_tokens, kv_sharing=self.kv_sharing)
