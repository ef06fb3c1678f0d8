"""Converted weights on disk: written once, memory-mapped ever after.

A mapped file costs no copy, and processes that load the same model share its pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.cache_folder import entry_path, usable_entry, written_entry
from lamella.model_executor.weights.forms import StoredTensor, WeightForm
from lamella.model_executor.weights.safetensors_files import (
    ALL_DTYPES,
    read_safetensors_header,
    write_safetensors_header,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2


def weight_entry_path(
    cache_dir: Path, files: Sequence[Path], dtype: torch.dtype, form: WeightForm, reading: str = ""
) -> Path:
    """Where the converted weights of `files`, as they are now, lie or would lie. reading: what tells apart two ways to
    read the same tensors."""
    kind = f"weights-{str(dtype).removeprefix('torch.')}-{form.name}{reading and '-' + reading}"
    return entry_path(cache_dir, files, kind=kind, format_version=FORMAT_VERSION, suffix=".safetensors")


def read_weight_entry(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor] | None:
    """The tensors in `stored`, mapped from `path`; None when there is no such file, it is damaged, or somebody else
    could have written it."""
    if not usable_entry(path):
        return None
    try:
        entries = read_safetensors_header(path)
    except ModelLoadError as error:
        logger.info("converted weights are damaged and will be made anew: %s", error)
        return None
    found = {name: (entry.shape, ALL_DTYPES.get(entry.dtype_name)) for name, entry in entries.items()}
    if found != dict(stored):
        logger.info("converted weights at %s are for another shape of the model and will be made anew", path)
        return None
    try:
        return map_safetensors(path)
    except Exception as error:  # the file is gone meanwhile, or damaged in a way that its header does not show
        logger.info("converted weights at %s cannot be mapped and will be made anew: %s", path, error)
        return None


def write_weight_entry(
    path: Path,
    pieces: Iterable[tuple[str, torch.Tensor]],
    stored: Mapping[str, StoredTensor],
    *,
    sources: Sequence[Path] = (),
) -> None:
    """Convert the parameters straight into a new file at `path`. It holds the tensors in `stored`, in their order,
    which is also that of the pieces.

    sources: the files that they come from. Raises OSError when it cannot be written.
    """
    with written_entry(path, sources=sources) as file:
        write_safetensors_header(file, stored)
        for _, part in pieces:
            file.write(part.contiguous().view(torch.uint8).numpy().data)


def map_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the file, as views of a private memory map of it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
