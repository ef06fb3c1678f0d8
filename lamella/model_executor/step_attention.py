"""The attention of one step: which cache, constants and batch go with each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend, AttentionParams, LayerCache, attend
from lamella.attention.metadata import AttentionMetadata, to_device
from lamella.attention.native_backend import HeadTransform, NativeBackend
from lamella.errors import InvariantError
from lamella.kv_cache.layout import KVLayout
from lamella.native.decoder import DecoderWeights, run_layers


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """What a layer's attention has whatever the step."""

    group: int
    params: AttentionParams
    cache: LayerCache


class KVTarget(NamedTuple):
    """Where the K and V of a layer's tokens go: slots int64 [T], page_id * page_tokens + offset, -1 for nowhere. Pages
    keep K / k_scale and V / v_scale."""

    cache: LayerCache
    slots: torch.Tensor
    k_scale: float
    v_scale: float


class StepAttention:
    """metadata: one for each group, of all tokens. needed_tokens: which of them layers take in, see ReceptiveField."""

    def __init__(
        self,
        backend: AttentionBackend,
        layout: KVLayout,
        places: list[LayerPlace],
        metadata: Sequence[AttentionMetadata],
        needed_tokens: Mapping[int, np.ndarray],
    ) -> None:
        self.backend = backend
        self.layout = layout
        self.places = places
        self.metadata = metadata
        self.needed_tokens = needed_tokens

    def output_rows(self, layer: int) -> torch.Tensor | None:
        """Which of the tokens that the layer takes in leave it (int64 [S]); None: all. The others give K and V only."""
        taken, left = self.needed_tokens.get(layer), self.needed_tokens.get(layer + 1)
        if left is None or (taken is not None and len(taken) == len(left)):
            return None
        rows = left if taken is None else np.searchsorted(taken, left)
        return to_device(rows, self.metadata[0].slot_mapping.device)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [S, num_heads, k_dim], k and v [T, num_kv_heads, dim] or None -> [S, num_heads, v_dim], for T tokens that
        the layer takes in and S that leave it."""
        place = self._place(layer, has_kv=k is not None)
        taken, left = self._metadata(place, layer), self._metadata(place, layer + 1)
        return attend(self.backend, place.params, place.cache, q, k, v, taken, queries=left)

    def run_layers(
        self,
        first: int,
        weights: Sequence[DecoderWeights],
        rotaries: Sequence[tuple[torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> None:
        """Layers with their own KV from `first` on, as `native.decoder.run_layers`; rotaries: cos and sin of each."""
        layers, steps = [], []
        for layer, (layer_weights, rotary) in enumerate(zip(weights, rotaries, strict=True), first):
            place = self._place(layer, has_kv=True)
            layers.append(self._native.decoder_layer(place.params, place.cache, layer_weights))
            steps.append(self._native.layer_step(place.params, rotary, self._metadata(place, layer)))
        run_layers(layers, steps, x, normed)

    def fused_outputs(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        transform: HeadTransform,
        output_rows: torch.Tensor,
    ) -> torch.Tensor:
        """K and V of the tokens that the layer takes in [T, columns], queries of those that leave it [S, columns] ->
        [S, num_heads, v_dim]. `transform` is of all T; output_rows: as `output_rows` gave them."""
        place = self._place(layer, has_kv=True)
        taken, left = self._metadata(place, layer), self._metadata(place, layer + 1)
        native = self._native
        native.write_keys_values(place.params, place.cache, keys_values, transform, taken)
        return native.attend_queries(place.params, place.cache, queries, transform.of_rows(output_rows), left)

    def kv_target(self, layer: int) -> KVTarget:
        """Where K and V of the T tokens that the layer takes in go, for operators that write token-major pages
        themselves; `attend_written` comes after the write."""
        if self.backend.name != "triton":
            raise InvariantError(
                f"operators asked for the pages of backend {self.backend.name!r} to write them; those that do go with "
                "'triton'"
            )
        place = self._place(layer, has_kv=True)
        slots = self._metadata(place, layer).slot_mapping
        return KVTarget(place.cache, slots, place.params.k_scale, place.params.v_scale)

    def attend_written(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [S, num_heads, k_dim] -> [S, num_heads, v_dim], for the S tokens that leave the layer; K and V have been
        written to `kv_target`."""
        place = self._place(layer, has_kv=True)
        metadata = self._metadata(place, layer + 1)
        return attend(self.backend, place.params, place.cache, q, None, None, metadata)

    def _metadata(self, place: LayerPlace, layer: int) -> AttentionMetadata:
        """Of the tokens that `layer` takes in, as the layer at `place` has them."""
        metadata, tokens = self.metadata[place.group], self.needed_tokens.get(layer)
        return metadata if tokens is None else metadata.of_tokens(tokens)

    def _place(self, layer: int, *, has_kv: bool) -> LayerPlace:
        if has_kv == self.layout.is_shared(layer):
            # One would overwrite the owner's KV, the other read pages that nobody has written.
            raise InvariantError(
                f"layer {layer} gave {'K and V' if has_kv else 'no K and V'}, but by the KV layout it "
                f"{f'reads those of layer {self.layout.owners[layer]}' if has_kv else 'keeps its own'}; "
                "model and layout must be built from one config"
            )
        return self.places[layer]

    @property
    def _native(self) -> NativeBackend:
        if not isinstance(self.backend, NativeBackend):
            raise InvariantError(
                f"fused attention was called on backend {self.backend.name!r}; native operators go with 'native'"
            )
        return self.backend
