"""From an adapter's folder to what a model's layers add."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from lamella.model_executor.adapters.lora_weights import read_lora
from lamella.model_executor.layers.adapters import Adapter
from lamella.model_executor.layers.contract import Operators
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.weight_map import WeightMap


class ReadAdapter(NamedTuple):
    """rank: the largest of its modules; digest: adapters of equal ones compute the same; num_left_out: modules that
    prompts of text do not pass."""

    adapter: Adapter
    rank: int
    digest: str
    num_modules: int
    num_left_out: int
    num_bytes: int


class AdapterReader(Protocol):
    def read(self, path: Path, *, most_rank: int | None) -> ReadAdapter:
        """most_rank: None: any. Raises ModelLoadError, see `read_lora`."""
        ...


class NativeAdapterReader:
    """For a described model that `operators` run. weights: how its family's files spell names."""

    def __init__(self, model: Model, operators: Operators, weights: WeightMap) -> None:
        self._model = model
        self._operators = operators
        self._weights = weights

    def read(self, path: Path, *, most_rank: int | None) -> ReadAdapter:
        found = read_lora(path, self._model, self._weights, most_rank=most_rank)
        adapter = self._operators.adapter(found.updates, self._model.device)
        return ReadAdapter(adapter, found.rank, found.digest, found.num_modules, found.num_left_out, found.num_bytes)
