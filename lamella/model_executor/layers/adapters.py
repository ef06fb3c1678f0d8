"""What adapters add to linear layers (LoRA, arXiv 2106.09685): of each row, up(down(x)) of its request's adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from lamella.errors import InvariantError

NO_ADAPTER = 0


class UpPart(NamedTuple):
    """What an update adds to the outputs [start, stop) of its layer, from the rank's numbers that begin at
    first_rank."""

    start: int
    stop: int
    first_rank: int
    weight: torch.Tensor  # float32 [stop - start, rank], with the adapter's scale in it

    @property
    def rank(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """What an adapter adds to one linear layer: up(down(x)). Where the layer is fused of several, `down` has those of
    its parts one after the other. Parts do not overlap, and are in the order of their outputs."""

    down: torch.Tensor  # float32 [rank of all parts, num_in]
    ups: tuple[UpPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.down, *(up.weight for up in self.ups)))


class AppliedUpdate(Protocol):
    """An update in the form that operators want."""

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, columns: slice) -> None:
        """Add up(down(x)) to y, in place, of the rows `rows` (int64 [n], ascending).

        x [T, num_in]; y [T, len(columns)]: the layer's outputs `columns`. No part lies half in and half out of
        `columns`. Rows that are not named keep their bits. Products and sums are float32 whatever the model computes
        in, as PEFT has it.
        """
        ...


class Adapter:
    """updates: by the name of the projection that they are for."""

    def __init__(self, updates: Mapping[str, AppliedUpdate]) -> None:
        self.updates = updates

    def touches(self, *projection_names: str) -> bool:
        return any(name in self.updates for name in projection_names)


class RowAdapters:
    """Which adapter each of a step's rows has."""

    def __init__(self, ids: np.ndarray, adapters: Mapping[int, Adapter], device: torch.device) -> None:
        """ids: int64 [T], each row's adapter; NO_ADAPTER: it has none. adapters: by id."""
        self._ids = ids
        self._adapters = adapters
        self._device = device
        self._last: tuple[torch.Tensor, RowAdapters] | None = None
        # The rows of each adapter, int64 [n], ascending.
        self.groups: list[tuple[Adapter, torch.Tensor]] = []
        for adapter_id in np.unique(ids).tolist():
            if adapter_id == NO_ADAPTER:
                continue
            if adapter_id not in adapters:
                raise InvariantError(f"a step has rows of adapter {adapter_id}; {sorted(adapters)} are loaded")
            rows = torch.from_numpy((ids == adapter_id).nonzero()[0]).to(device)
            self.groups.append((adapters[adapter_id], rows))

    @property
    def num_rows(self) -> int:
        return len(self._ids)

    def of_rows(self, rows: torch.Tensor | None) -> RowAdapters:
        """The same of the rows `rows` (int64 [S]); None: of all."""
        if rows is None:
            return self
        if self._last is None or self._last[0] is not rows:  # layer after layer asks for the same rows
            self._last = rows, RowAdapters(self._ids[rows.cpu().numpy()], self._adapters, self._device)
        return self._last[1]

    def touch(self, *projection_names: str) -> bool:
        """Whether an adapter of some row adds to one of these."""
        return any(adapter.touches(*projection_names) for adapter, _ in self.groups)

    def add_to(self, y: torch.Tensor, projection_name: str, x: torch.Tensor, columns: slice) -> None:
        """Add to y [T, len(columns)], the projection's outputs `columns` for x [T, num_in], what each row's adapter
        adds. In place."""
        for adapter, rows in self.groups:
            if (update := adapter.updates.get(projection_name)) is not None:
                update.add_to(y, x, rows, columns)
