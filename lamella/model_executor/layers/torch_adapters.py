"""Low-rank updates in eager PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear

from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate


class TorchUpdate:
    """See AppliedUpdate."""

    def __init__(self, update: LowRankUpdate, device: torch.device) -> None:
        self._down = update.down.to(device)
        self._ups = [up._replace(weight=up.weight.to(device)) for up in update.ups]

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, columns: slice) -> None:
        is_of_all = len(rows) == len(x)
        low = linear((x if is_of_all else x[rows]).float(), self._down)  # [n, rank of all parts]
        for up in self._ups:
            if up.start < columns.start or up.stop > columns.stop:
                continue
            added = linear(low[:, up.first_rank : up.first_rank + up.rank], up.weight)
            outputs = y[:, up.start - columns.start : up.stop - columns.start]
            if is_of_all:
                outputs.copy_(outputs + added)
            else:
                outputs[rows] = (outputs[rows] + added).to(y.dtype)


def torch_adapter(updates: Mapping[str, LowRankUpdate], device: torch.device) -> Adapter:
    return Adapter({name: TorchUpdate(update, device) for name, update in updates.items()})
