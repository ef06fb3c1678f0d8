"""Adapters as the native kernels take them: in the calls that run whole layers, and projection by projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate, RowAdapters
from lamella.model_executor.layers.description import DecoderLayer, DenseMLP
from lamella.native.linear import pack_weight
from lamella.native.low_rank import AdaptedLayers, AdaptedProjections, LowRank, StepAdapters, Up


class NativeUpdate:
    """See AppliedUpdate."""

    def __init__(self, update: LowRankUpdate) -> None:
        self.low_rank = LowRank(
            pack_weight(update.down.contiguous()),
            [Up(up.start, up.first_rank, pack_weight(up.weight.contiguous())) for up in update.ups],
        )

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, columns: slice) -> None:
        self.low_rank.add_to(y, x.contiguous(), rows, columns)


class NativeAdapter(Adapter):
    """layers: what it adds to each layer of the model, for the calls that run whole layers."""

    def __init__(self, updates: Mapping[str, LowRankUpdate], layers: Sequence[DecoderLayer]) -> None:
        native = {name: NativeUpdate(update) for name, update in updates.items()}
        super().__init__(native)
        self.layers = AdaptedLayers([_projections(native, layer) for layer in layers])


def _projections(updates: Mapping[str, NativeUpdate], layer: DecoderLayer) -> AdaptedProjections:
    attention, mlp = layer.attention, layer.mlp
    names = [attention.qkv_proj.name, attention.o_proj.name]
    if isinstance(mlp, DenseMLP):
        names += [mlp.gate_up_proj.name, mlp.down_proj.name]
    found = (updates.get(name) for name in names)
    return AdaptedProjections(*(None if each is None else each.low_rank for each in found))


def native_adapters(adapters: RowAdapters) -> StepAdapters | None:
    """None: no row has one."""
    of_rows = []
    for adapter, rows in adapters.groups:
        if not isinstance(adapter, NativeAdapter):
            raise InvariantError(f"native operators were given a {type(adapter).__name__}; they make their own")
        of_rows.append((adapter.layers, rows))
    return StepAdapters(of_rows, adapters.num_rows) if of_rows else None
