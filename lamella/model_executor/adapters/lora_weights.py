"""A LoRA adapter as PEFT saves one: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.adapters.lora_config import LoraConfig, read_lora_config
from lamella.model_executor.adapters.module_places import ModulePlaces, Place
from lamella.model_executor.layers.adapters import LowRankUpdate, UpPart
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.typed_fields import shown
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights.regular_files import is_there
from lamella.model_executor.weights.row_pairs import unpaired
from lamella.model_executor.weights.safetensors_files import DTYPES, SafetensorsEntry, read_safetensors_header

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_NUM_TOLD = 3
# What else PEFT stores of a module -> what it is.
_OTHER_TENSORS = {
    "lora_embedding_A": "an adapter of embeddings, which is not built; train one without them in target_modules",
    "lora_embedding_B": "an adapter of embeddings, which is not built; train one without them in target_modules",
    "lora_magnitude_vector": "DoRA's, which is not built; merge it into the model",
    "bias": "a bias of the adapter's own, which is not built; merge it into the model",
}


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """updates: by the name of the projection. rank: the largest. digest: of all numbers and of where they are added:
    adapters of equal digests compute the same. num_left_out: modules that prompts of text do not pass."""

    updates: Mapping[str, LowRankUpdate]
    rank: int
    digest: str
    num_modules: int
    num_left_out: int

    @property
    def num_bytes(self) -> int:
        return sum(update.num_bytes for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class _Module:
    """What a file has of a module, up to now."""

    name: str  # its path in transformers' model
    tensors: dict[str, tuple[str, SafetensorsEntry]]  # "lora_A", "lora_B" -> its name in the file, and its entry


def read_lora(path: Path, model: Model, weights: WeightMap, *, most_rank: int | None = None) -> LoraWeights:
    """The adapter in the folder `path`, for `model`, whose families' files spell names as `weights` says.

    most_rank: None: any. Raises ModelLoadError: a file is not there or not what PEFT writes, the adapter is for another
    model, does not do what its config says, or asks for what is not built.
    """
    _check_folder(path)
    config = read_lora_config(path)
    file = path / WEIGHTS_NAME
    modules = _modules(file)
    places = ModulePlaces(model, weights, str(file))
    taken: dict[str, list[_Piece]] = {}
    rank = num_left_out = 0
    with _opened(file) as tensors:
        for module in modules:
            found = places.find(module.name)
            if not config.is_target(module.name):
                raise ModelLoadError(
                    f"{file} has tensors of {module.name}, which target_modules={shown(config.target_modules)} and "
                    f"what else {config.place} says of modules leave out; save the adapter again"
                )
            if not found:
                num_left_out += 1
                continue
            its_rank = config.rank_of(module.name)
            if most_rank is not None and its_rank > most_rank:
                raise ModelLoadError(
                    f"{config.place}: r={its_rank} of {module.name} is more than max_lora_rank={most_rank}; raise "
                    "max_lora_rank"
                )
            rank = max(rank, its_rank)
            _check_shapes(file, module, found, its_rank)
            down, up = (_read(tensors, file, module, which) for which in ("lora_A", "lora_B"))
            for place in found:
                taken.setdefault(place.projection.name, []).append(
                    _piece(file, module, place, down, up, config.scale_of(module.name), weights)
                )
    if not taken:
        raise ModelLoadError(
            f"{file}: none of its {len(modules)} modules is one that prompts of text pass; give an adapter of the text "
            "model"
        )
    _check_complete(config, places, taken)
    updates = {name: _update(file, pieces) for name, pieces in sorted(taken.items())}
    return LoraWeights(updates, rank, _digest(updates), len(modules) - num_left_out, num_left_out)


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelLoadError(
            f"{path} is no folder; give one that PEFT's save_pretrained has written (hubs are never asked: download it "
            "first)"
        )
    if not is_there(path / WEIGHTS_NAME) and is_there(path / _PICKLED_NAME):
        raise ModelLoadError(
            f"{path / _PICKLED_NAME} is a pickle, which could run code and is never read; save the adapter as "
            f"{WEIGHTS_NAME}: PEFT's save_pretrained does by default"
        )


def _modules(file: Path) -> list[_Module]:
    modules: dict[str, _Module] = {}
    for stored_name, entry in read_safetensors_header(file).items():
        if not stored_name.startswith(_PREFIX):
            raise ModelLoadError(
                f"{file}: tensor {shown(stored_name)}: names begin with {_PREFIX!r} where PEFT has saved an adapter of "
                "a language model; save it by PeftModel.save_pretrained"
            )
        found = re.fullmatch(r"(.+)\.(lora_A|lora_B)\.weight", stored_name.removeprefix(_PREFIX))
        if found is None:
            kinds = [why for part, why in _OTHER_TENSORS.items() if part in stored_name.split(".")]
            what = kinds[0] if kinds else "neither a module's lora_A.weight nor its lora_B.weight; save it by PEFT"
            raise ModelLoadError(f"{file}: tensor {shown(stored_name)} is {what}")
        modules.setdefault(found[1], _Module(found[1], {})).tensors[found[2]] = (stored_name, entry)
    if not modules:
        raise ModelLoadError(f"{file} holds no tensors; save the adapter again")
    for module in modules.values():
        lacking = {"lora_A", "lora_B"} - module.tensors.keys()
        if lacking:
            raise ModelLoadError(f"{file} lacks {lacking.pop()}.weight of {shown(module.name)}; copy or save it again")
    return list(modules.values())


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: safetensors cannot open it: {error}") from error


def _check_shapes(file: Path, module: _Module, places: list[Place], rank: int) -> None:
    projection = places[0].projection
    wanted = {"lora_A": (rank, projection.num_in), "lora_B": (places[0].num_rows, rank)}
    for which, shape in wanted.items():
        stored_name, entry = module.tensors[which]
        if entry.shape != shape:
            raise ModelLoadError(
                f"{file}: {stored_name} has shape {list(entry.shape)}, wanted {list(shape)}: rank {rank} by the "
                "adapter's config, and the model's own sizes; give an adapter of this model"
            )
        if entry.dtype_name not in DTYPES:
            raise ModelLoadError(
                f"{file}: {stored_name}: dtype {entry.dtype_name} is not read; known: {', '.join(DTYPES)}"
            )


def _read(tensors: Any, file: Path, module: _Module, which: str) -> torch.Tensor:
    stored_name, _ = module.tensors[which]
    values: torch.Tensor = tensors.get_tensor(stored_name).float()
    if not values.isfinite().all():
        raise ModelLoadError(f"{file}: {stored_name} holds values that are no finite numbers; save or copy it again")
    return values


@dataclass(frozen=True, slots=True)
class _Piece:
    place: Place
    down: torch.Tensor
    up: torch.Tensor  # with its scale, its rows in the model's order
    module: str


def _piece(
    file: Path, module: _Module, place: Place, down: torch.Tensor, up: torch.Tensor, scale: float, weights: WeightMap
) -> _Piece:
    rows, start = [], 0
    for part in place.parts:
        values = up[start : start + part.num_rows]
        # What transformers' modules give is in the order of its own files, also where the model came from others.
        if part.head_rows and weights.safetensors_pairs and len(place.parts) == 1:
            values = unpaired(values, part.head_rows, part.paired_rows)
        rows.append(values * (part.factor * scale))
        start += part.num_rows
    scaled = torch.cat(rows)
    if not scaled.isfinite().all():
        raise ModelLoadError(
            f"{file}: {module.name}: its weights times its scale {scale:g} are more than float32 holds; set a smaller "
            "lora_alpha"
        )
    return _Piece(place, down, scaled, module.name)


def _update(file: Path, pieces: list[_Piece]) -> LowRankUpdate:
    pieces = sorted(pieces, key=lambda piece: piece.place.start)
    downs: list[torch.Tensor] = []
    ups: list[UpPart] = []
    first_rank = stop = 0
    for piece in pieces:
        start = piece.place.start
        if start < stop:
            raise ModelLoadError(
                f"{file}: {pieces[0].module} and {piece.module} are the same layer's; save the adapter again"
            )
        # Each part of a fused layer that one module adds to is a part of the update, so that products of some of the
        # layer's outputs find whole ones.
        for part in piece.place.parts:
            offset = start - piece.place.start
            ups.append(UpPart(start, start + part.num_rows, first_rank, piece.up[offset : offset + part.num_rows]))
            start += part.num_rows
        downs.append(piece.down)
        first_rank += len(piece.down)
        stop = start
    return LowRankUpdate(torch.cat(downs), tuple(ups))


def _check_complete(config: LoraConfig, places: ModulePlaces, taken: Mapping[str, list[_Piece]]) -> None:
    """Every module that the config names must be there: PEFT would run without what a cut file lacks."""
    prefix = next(iter(taken.values()))[0].module.partition("layers.")[0]
    covered = {(name, start) for name, pieces in taken.items() for piece in pieces for start in _starts(piece.place)}
    lacking = []
    for stored_names, its_places in places.known():
        if all((place.projection.name, place.start) in covered for place in its_places):
            continue
        lacking += [prefix + name for name in stored_names if config.is_target(prefix + name)][:1]
    if lacking:
        more = f" and {len(lacking) - _NUM_TOLD} more" if len(lacking) > _NUM_TOLD else ""
        raise ModelLoadError(
            f"{config.place}: target_modules={shown(config.target_modules)} names {', '.join(lacking[:_NUM_TOLD])}"
            f"{more}, of which {WEIGHTS_NAME} has no tensors; copy or save the adapter again"
        )


def _starts(place: Place) -> list[int]:
    starts, start = [], place.start
    for part in place.parts:
        starts.append(start)
        start += part.num_rows
    return starts


def _digest(updates: Mapping[str, LowRankUpdate]) -> str:
    digest = hashlib.sha256()
    for name, update in updates.items():
        digest.update(f"{name} {tuple(update.down.shape)}\n".encode())
        digest.update(update.down.contiguous().numpy().tobytes())
        for up in update.ups:
            digest.update(f"{up.start} {up.stop} {up.first_rank} {up.rank}\n".encode())
            digest.update(up.weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
