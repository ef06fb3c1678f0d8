"""The attention of one step: which cache, constants and batch go with each layer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend, AttentionParams, LayerCache, attend
from lamella.attention.metadata import AttentionMetadata, to_device
from lamella.errors import InvariantError
from lamella.kv_cache.layout import KVLayout
from lamella.model_executor.step_clock import StepClock


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """What a layer's attention needs and what is the same in every step."""

    group: int
    params: AttentionParams
    cache: LayerCache


class StepAttention:
    """Attends for the layers of one step. metadata: one for each group, of all tokens. needed_tokens: which of them
    each layer takes in, see `ReceptiveField`. clock: what is told how long attention takes; None: nobody wants to
    know."""

    def __init__(
        self,
        backend: AttentionBackend,
        layout: KVLayout,
        places: list[LayerPlace],
        metadata: Sequence[AttentionMetadata],
        needed_tokens: Mapping[int, np.ndarray],
        clock: StepClock | None = None,
    ) -> None:
        self.backend = backend
        self.layout = layout
        self.places = places
        self.metadata = metadata
        self.needed_tokens = needed_tokens
        self.clock = clock
        self._output_rows: dict[int, torch.Tensor | None] = {}

    def output_rows(self, layer: int) -> torch.Tensor | None:
        """Which of the tokens that the layer takes in also leave it (int64 [S]); None: all. The others only give K and
        V."""
        if not self.needed_tokens:  # as when all rows decode
            return None
        if layer not in self._output_rows:
            self._output_rows[layer] = self._find_output_rows(layer)
        return self._output_rows[layer]

    def _find_output_rows(self, layer: int) -> torch.Tensor | None:
        return self.rows_between(layer, layer + 1)

    def rows_between(self, lower: int, upper: int) -> torch.Tensor | None:
        """Which of the tokens that the layer `lower` takes in the layer `upper` takes in, too (int64 [S]); None: all.
        The number of layers is what leaves the last."""
        taken, left = self.needed_tokens.get(lower), self.needed_tokens.get(upper)
        if left is None or (taken is not None and len(taken) == len(left)):
            return None
        rows = left if taken is None else np.searchsorted(taken, left)
        return to_device(rows, self.metadata[0].slot_mapping.device)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [S, num_heads, k_dim], k and v [T, num_kv_heads, dim] or None -> [S, num_heads, v_dim], for T tokens that
        the layer takes in and S that leave it."""
        place = self.place(layer, has_kv=k is not None)
        start = time.monotonic()
        attended = attend(self.backend, place.params, place.cache, q, k, v, self.taken(layer), queries=self.left(layer))
        if self.clock is not None:
            self.clock.add_attention(start)
        return attended

    def attend_written(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [S, num_heads, k_dim] -> [S, num_heads, v_dim], for the S tokens that leave the layer; K and V are in their
        pages already."""
        place = self.places[layer]
        start = time.monotonic()
        attended = attend(self.backend, place.params, place.cache, q, None, None, self.left(layer))
        if self.clock is not None:
            self.clock.add_attention(start)
        return attended

    def taken(self, layer: int) -> AttentionMetadata:
        """The metadata of the tokens that the layer takes in."""
        return self._metadata(layer, self.needed_tokens.get(layer))

    def left(self, layer: int) -> AttentionMetadata:
        """The metadata of the tokens that leave the layer."""
        return self._metadata(layer, self.needed_tokens.get(layer + 1))

    def _metadata(self, layer: int, tokens: np.ndarray | None) -> AttentionMetadata:
        metadata = self.metadata[self.places[layer].group]
        return metadata if tokens is None else metadata.of_tokens(tokens)

    def place(self, layer: int, *, has_kv: bool) -> LayerPlace:
        """The layer's cache and constants. has_kv: whether it gives K and V; InvariantError where the layout has it
        otherwise."""
        if has_kv == self.layout.is_shared(layer):
            # K and V too many would overwrite the owner's; without them the layer would read pages that nobody has
            # written.
            raise InvariantError(
                f"layer {layer} gave {'K and V' if has_kv else 'no K and V'}, but by the KV layout it "
                f"{f'reads those of layer {self.layout.owners[layer]}' if has_kv else 'keeps its own'}; "
                "model and layout must be built from one config"
            )
        return self.places[layer]
