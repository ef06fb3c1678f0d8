"""Where in a described model the linear layers lie that transformers' modules name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import DenseMLP, Model, Projection
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights.parameters import Part


class Place(NamedTuple):
    """The outputs of a projection, from `start` on, that parts of a checkpoint's layer fill."""

    projection: Projection
    start: int
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


class ModulePlaces:
    """The linear layers of `model` that adapters can add to. place: how errors name the adapter."""

    def __init__(self, model: Model, weights: WeightMap, place: str) -> None:
        self._model = model
        self._weights = weights
        self._place = place
        self._places: dict[str, list[Place]] = {}  # by the model's own names
        for projection in _adaptable(model):
            start = 0
            for part in projection.parts:
                self._places.setdefault(part.name, []).append(Place(projection, start, (part,)))
                start += part.num_rows
            if len(projection.parts) > 1:
                self._places[projection.name] = [Place(projection, 0, projection.parts)]

    def find(self, module: str) -> list[Place]:
        """module: the path of a linear layer in transformers' model. Empty for one that the model leaves out, because
        prompts of text do not pass it, or because it makes K and V that are not read.

        Raises ModelLoadError for a module that no adapter can be applied to.
        """
        name = self._weights.from_safetensors(f"{module}.weight").removesuffix(".weight")
        if name in self._places:
            return self._places[name]
        if self._weights.left_out(f"{module}.weight") is not None or self._is_of_read_kv(name):
            return []
        raise ModelLoadError(f"{self._place}: {module}: {self._reason(name)}")

    def known(self) -> Iterator[tuple[tuple[str, ...], list[Place]]]:
        """Every place that one part fills, with the names that transformers may give its module, without what stands
        before "layers."."""
        for name, places in self._places.items():
            projection = places[0].projection
            if len(places[0].parts) > 1:
                continue
            yield (*self._stored_names(name), *self._stored_names(projection.name)), places

    def _stored_names(self, name: str) -> list[str]:
        layer, _, inner = name.removeprefix("layers.").partition(".")
        return [f"layers.{layer}.{stored}" for stored, own in self._weights.safetensors_layer.items() if own == inner]

    def _is_of_read_kv(self, name: str) -> bool:
        for layer in self._model.layers:
            owner = layer.attention.config.kv_owner
            if owner is not None and name in (f"layers.{layer.index}.self_attn.{part}_proj" for part in "kv"):
                return True
        return False

    def _reason(self, name: str) -> str:
        if "embed_tokens" in name or name == "lm_head":
            return (
                "adapters of embeddings and of the head are not built; train one without it in target_modules, or "
                "merge it into the model"
            )
        if ".experts" in name or ".shared" in name or ".router" in name:
            return (
                "adapters of experts, of what runs beside them and of what chooses them are not built; train one of "
                "attention's layers, or merge it into the model"
            )
        if name.startswith("per_layer"):
            return "adapters of what makes the layers' own inputs are not built; merge it into the model"
        return (
            f"the model, of {self._model.config.num_layers} layers of {self._model.config.architecture}, has no such "
            "linear layer; give an adapter of this model"
        )


def _adaptable(model: Model) -> Iterator[Projection]:
    for layer in model.layers:
        attention = layer.attention
        yield attention.qkv_proj
        yield attention.o_proj
        if attention.gate_proj is not None:
            yield attention.gate_proj
        if isinstance(layer.mlp, DenseMLP):
            yield layer.mlp.gate_up_proj
            yield layer.mlp.down_proj
        if layer.per_layer_gate is not None:
            yield layer.per_layer_gate.gate
            yield layer.per_layer_gate.projection
