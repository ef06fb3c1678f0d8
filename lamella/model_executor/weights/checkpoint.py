"""A checkpoint's tensors under one set of names, whatever file they lie in.

The names are those that a family of models gives its parameters ("layers.0.self_attn.q_proj.weight",
"lm_head.weight"); its `WeightNames` says how files spell them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.weights import mxfp4
from lamella.model_executor.weights.gguf_header import GgufHeader
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.gguf_tensors import GgufTensorData, storage_problem
from lamella.model_executor.weights.safetensors_files import DTYPES, SafetensorsEntry, read_safetensors_header
from lamella.model_executor.weights.stacked import ExpertStack, StackView, expert_views, read_view

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

    def safetensors_stack(self, name: str) -> tuple[str, ExpertStack] | None:
        """Of a stored tensor that holds all experts of a layer: what the model calls these, and how it holds them."""
        ...

    def gguf_stack(self, name: str) -> tuple[str, ExpertStack] | None: ...

    def left_out(self, name: str) -> str | None:
        """What a stored tensor belongs to, if the model deliberately leaves it out; else None."""
        ...

    def gguf_left_out(self, name: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """stored_name: as the file spells it; problem: why its values cannot be read, or None. view: where it is in the
    stored tensor, if that holds all experts of a layer; scales_name: what file calls the scales of its MXFP4 blocks."""

    stored_name: str
    shape: tuple[int, ...]
    problem: str | None = None
    view: StackView | None = None
    scales_name: str | None = None


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


@runtime_checkable
class BlockCheckpoint(Checkpoint, Protocol):
    """One whose matrices may lie in quantised blocks."""

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a matrix in blocks, as GGUF has them: uint8 [n, bytes of a row]."""
        ...

    def type_name(self, name: str) -> str:
        """ggml's name of the storage format."""
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
        self._paths: dict[str, Path] = {}  # of stored tensors
        entries: dict[str, SafetensorsEntry] = {}  # of stored tensors, too
        for path in paths:
            for stored_name, entry in read_safetensors_header(path).items():
                if (family := names.left_out(stored_name)) is not None:
                    self.left_out[family] += 1
                    continue
                self._paths[stored_name], entries[stored_name] = path, entry
                for name, tensor in _stored_tensors(stored_name, entry, names):
                    if name in self.tensors:
                        other = self.tensors[name].stored_name
                        raise ModelLoadError(
                            f"{path} holds {stored_name}, which {self._paths[other]} holds as {other}; remove one of "
                            "the files"
                        )
                    self.tensors[name] = tensor
        self._take_scales(entries)
        try:
            self._files = {path: safe_open(path, framework="pt") for path in paths}
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{paths[0].parent}: safetensors cannot open its files: {error}") from error

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        if tensor.scales_name is not None:
            return mxfp4.dequantize(*self._mxfp4(tensor, start, stop))
        file = self._files[self._paths[tensor.stored_name]]
        if tensor.view is not None:
            return read_view(file.get_slice(tensor.stored_name), tensor.view, start, stop)
        if not tensor.shape or (start, stop) == (0, tensor.shape[0]):
            return file.get_tensor(tensor.stored_name)
        return file.get_slice(tensor.stored_name)[start:stop]

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a matrix of MXFP4 blocks, as GGUF has them: uint8 [n, bytes of a row]."""
        return mxfp4.as_gguf(*self._mxfp4(self.tensors[name], start, stop))

    def type_name(self, name: str) -> str:
        """ggml's name of the storage format; "F32" for all but MXFP4, which is what the others are read as."""
        return "F32" if self.tensors[name].scales_name is None else "MXFP4"

    def _take_scales(self, entries: Mapping[str, SafetensorsEntry]) -> None:
        """The scales of MXFP4 blocks are no tensors of the model's own. entries: all stored tensors by name."""
        scales_names = {tensor.scales_name for tensor in self.tensors.values() if tensor.scales_name is not None}
        for name, tensor in list(self.tensors.items()):
            if tensor.stored_name in scales_names:
                del self.tensors[name]
            elif tensor.scales_name is not None and tensor.problem is None:
                problem = _scales_problem(tensor.stored_name, tensor.scales_name, entries)
                self.tensors[name] = replace(tensor, problem=problem)

    def _mxfp4(self, tensor: CheckpointTensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, scales) of rows of a matrix, see `mxfp4`."""
        view, scales_name = tensor.view, tensor.scales_name
        assert view is not None
        assert scales_name is not None

        def read(name: str) -> torch.Tensor:
            return read_view(self._files[self._paths[name]].get_slice(name), view, start, stop)

        return read(tensor.stored_name), read(scales_name)

    def same_values(self, first: str, second: str) -> bool:
        shape = self.tensors[first].shape
        return self.tensors[second].shape == shape and all(
            torch.equal(self.read_rows(first, *piece).float(), self.read_rows(second, *piece).float())
            for piece in _pieces(shape)
        )


def _scales_problem(blocks_name: str, scales_name: str, entries: Mapping[str, SafetensorsEntry]) -> str | None:
    """Why the scales of MXFP4 blocks cannot be theirs; None: they are, one byte for each block."""
    if scales_name not in entries:
        return f"{blocks_name}: {scales_name}, the scales of its blocks, is missing"
    scales, shape = entries[scales_name], entries[blocks_name].shape[:-1]
    if scales.dtype_name != "U8":
        return f"{scales_name}: dtype {scales.dtype_name} is not read; known: U8"
    if scales.shape != shape:
        return f"{scales_name} has shape {list(scales.shape)}; the blocks of {blocks_name} have scales {list(shape)}"
    return None


def _stored_tensors(
    stored_name: str, entry: SafetensorsEntry, names: WeightNames
) -> Iterator[tuple[str, CheckpointTensor]]:
    """What a stored tensor is to the model, by the model's names: itself, or the experts' matrices in it."""
    stack = names.safetensors_stack(stored_name)
    views = [] if stack is None else list(expert_views(stack[1], entry.shape, stack[0]))
    scales = None if stack is None else stack[1].scales
    readable = DTYPES if scales is None else ("U8",)
    problem = None
    if entry.dtype_name not in readable:
        problem = f"{stored_name}: dtype {entry.dtype_name} is not read; known: {', '.join(readable)}"
    if not views:
        yield names.from_safetensors(stored_name), CheckpointTensor(stored_name, entry.shape, problem)
    scales_name = None if scales is None else f"{stored_name.rpartition('.')[0]}.{scales}"
    for name, shape, view in views:
        yield name, CheckpointTensor(stored_name, shape, problem, view, scales_name)


class GgufCheckpoint:
    """A GGUF file, or all parts of a split one.

    Raises ModelLoadError when one is unreadable or ends inside its header, or two tensors are the same parameter.
    """

    def __init__(self, path: Path, names: WeightNames, header: GgufHeader | None = None) -> None:
        """path: the file, or the first part. header: what `read_gguf_model` has read of it already."""
        header = header or read_gguf_model(path)
        self.norm_offset = names.gguf_norm_offset
        self.has_pairs = names.gguf_pairs
        self.left_out: Counter[str] = Counter()
        self.tensors: dict[str, CheckpointTensor] = {}
        for tensor in header.tensors.values():
            if (family := names.gguf_left_out(tensor.name)) is not None:
                self.left_out[family] += 1
                continue
            problem, stack = storage_problem(header, tensor), names.gguf_stack(tensor.name)
            views: list[tuple[str, tuple[int, ...], StackView | None]] = []
            if stack is not None:
                views += expert_views(stack[1], tensor.shape, stack[0])
            for name, shape, view in views or [(names.from_gguf(tensor.name), tensor.shape, None)]:
                if name in self.tensors:
                    raise ModelLoadError(
                        f"{path} holds {tensor.name}, which it also holds as {self.tensors[name].stored_name}; remove "
                        "one"
                    )
                self.tensors[name] = CheckpointTensor(tensor.name, shape, problem, view)
        self._data = GgufTensorData(header)
        self._rows_per_matrix = {each.name: each.shape[-2] for each in header.tensors.values() if len(each.shape) == 3}

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        view = tensor.view
        if view is not None and len(tensor.shape) == 1:
            vector = self._data.read_rows(tensor.stored_name, view.expert, view.expert + 1)[0]
            return vector[view.first + start : view.first + stop]
        return self._data.read_rows(tensor.stored_name, *self._stored_rows(tensor, start, stop))

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a matrix as the file has them: uint8 [n, bytes of a row], a view."""
        tensor = self.tensors[name]
        return self._data.read_blocks(tensor.stored_name, *self._stored_rows(tensor, start, stop))

    def _stored_rows(self, tensor: CheckpointTensor, start: int, stop: int) -> tuple[int, int]:
        """Where rows are among all rows of the stored tensor. Each expert's lie one after the other in these files."""
        first = 0
        if tensor.view is not None:
            first = tensor.view.expert * self._rows_per_matrix[tensor.stored_name] + tensor.view.first
        return first + start, first + stop

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
