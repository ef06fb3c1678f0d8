"""A checkpoint's tensors under one set of names, whatever file they lie in.

The names are those that a family of models gives its parameters ("layers.0.self_attn.q_proj.weight",
"lm_head.weight"); its `WeightNames` says how files spell them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.gguf_header import GgufHeader, read_gguf_header
from lamella.model_executor.weights.gguf_tensors import GgufTensorData, storage_problem
from lamella.model_executor.weights.safetensors_files import DTYPES, read_safetensors_header

_PIECE_ELEMENTS = 1 << 22


class WeightNames(Protocol):
    """How a family's tensors are spelled in files, and what these hold (`models.weight_map.WeightMap`)."""

    @property
    def safetensors_norm_offset(self) -> float:
        """What turns a stored norm weight into the multiplier that the model applies."""
        ...

    @property
    def gguf_norm_offset(self) -> float: ...

    @property
    def safetensors_pairs(self) -> bool:
        """Whether files hold the rows of Q and K in pairs, see `row_pairs.unpaired`."""
        ...

    @property
    def gguf_pairs(self) -> bool: ...

    def from_safetensors(self, name: str) -> str:
        """A stored name -> the model's. A name that the family does not know comes back as it is, so that the error for
        a tensor without a place can name it."""
        ...

    def from_gguf(self, name: str) -> str: ...

    def left_out(self, name: str) -> str | None:
        """What a stored tensor belongs to, if the model deliberately leaves it out; else None."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """stored_name: as the file spells it; problem: why its values cannot be read, or None."""

    stored_name: str
    shape: tuple[int, ...]
    problem: str | None = None


class Checkpoint(Protocol):
    """Headers are read when one is made, values only by `read_rows`, which may be called from threads."""

    tensors: dict[str, CheckpointTensor]
    left_out: Counter[str]  # what the model deliberately leaves out -> number of its tensors
    norm_offset: float  # what turns a stored norm weight into the multiplier that the model applies
    has_pairs: bool  # whether rows of Q and K are as `row_pairs.unpaired` takes them

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) along the first dimension; a single number itself. May be a view of the file: do not
        write to it."""
        ...

    def same_values(self, first: str, second: str) -> bool:
        """Whether two tensors that can be read hold the same numbers. Reads them up to the first difference."""
        ...


class SafetensorsCheckpoint:
    """A Hugging Face checkpoint, of the files `paths` in one folder.

    Raises ModelLoadError when a file is unreadable or truncated, or a tensor is there twice.
    """

    def __init__(self, paths: Sequence[Path], names: WeightNames) -> None:
        from safetensors import SafetensorError, safe_open

        self.norm_offset = names.safetensors_norm_offset
        self.has_pairs = names.safetensors_pairs
        self.tensors: dict[str, CheckpointTensor] = {}
        self.left_out: Counter[str] = Counter()
        self._places: dict[str, Path] = {}
        for path in paths:
            for stored_name, entry in read_safetensors_header(path).items():
                if (family := names.left_out(stored_name)) is not None:
                    self.left_out[family] += 1
                    continue
                name = names.from_safetensors(stored_name)
                if name in self.tensors:
                    raise ModelLoadError(
                        f"{path} holds {stored_name}, which {self._places[name]} holds as "
                        f"{self.tensors[name].stored_name}; remove one of the files"
                    )
                problem = None
                if entry.dtype_name not in DTYPES:
                    problem = f"{stored_name}: dtype {entry.dtype_name} is not read; known: {', '.join(DTYPES)}"
                self.tensors[name] = CheckpointTensor(stored_name, entry.shape, problem)
                self._places[name] = path
        try:
            self._files = {path: safe_open(path, framework="pt") for path in paths}
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{paths[0].parent}: safetensors cannot open its files: {error}") from error

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        file = self._files[self._places[name]]
        if not tensor.shape or (start, stop) == (0, tensor.shape[0]):
            return file.get_tensor(tensor.stored_name)
        return file.get_slice(tensor.stored_name)[start:stop]

    def same_values(self, first: str, second: str) -> bool:
        shape = self.tensors[first].shape
        return self.tensors[second].shape == shape and all(
            torch.equal(self.read_rows(first, *piece).float(), self.read_rows(second, *piece).float())
            for piece in _pieces(shape)
        )


class GgufCheckpoint:
    """A GGUF file.

    Raises ModelLoadError when it is unreadable or ends inside its header, or two of its tensors are the same
    parameter.
    """

    def __init__(self, path: Path, names: WeightNames, header: GgufHeader | None = None) -> None:
        """header: that of the file, where it has been read already."""
        header = header or read_gguf_header(path)
        self.norm_offset = names.gguf_norm_offset
        self.has_pairs = names.gguf_pairs
        self.left_out: Counter[str] = Counter()
        self.tensors: dict[str, CheckpointTensor] = {}
        for tensor in header.tensors.values():
            if (family := names.left_out(tensor.name)) is not None:
                self.left_out[family] += 1
                continue
            name = names.from_gguf(tensor.name)
            if name in self.tensors:
                raise ModelLoadError(
                    f"{path} holds {tensor.name}, which it also holds as {self.tensors[name].stored_name}; remove one"
                )
            self.tensors[name] = CheckpointTensor(tensor.name, tensor.shape, storage_problem(header, tensor))
        self._data = GgufTensorData(header)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._data.read_rows(self.tensors[name].stored_name, start, stop)

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a matrix as the file has them: uint8 [n, bytes of a row], a view."""
        return self._data.read_blocks(self.tensors[name].stored_name, start, stop)

    def type_name(self, name: str) -> str:
        """ggml's name of the storage format."""
        return self._data.type_name(self.tensors[name].stored_name)

    def same_values(self, first: str, second: str) -> bool:
        """See Checkpoint. Matrices in different storage formats count as different, because expanding them would take
        as long as loading."""
        shape = self.tensors[first].shape
        is_alike = self.tensors[second].shape == shape and self.type_name(first) == self.type_name(second)
        return is_alike and all(
            np.array_equal(self.read_blocks(first, *piece), self.read_blocks(second, *piece))
            for piece in _pieces(shape)
        )


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, a few MiB each."""
    rows_at_once = max(1, _PIECE_ELEMENTS // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows_at_once):
        yield start, min(start + rows_at_once, shape[0])
