"""The header of a GGUF file: its metadata and its table of tensors, checked against the format and the file's length.

The `gguf` package's reader makes an object of every vocabulary entry (seconds for 262,144 of them), so the
header is read here; only the arithmetic of the quantised formats is taken from the package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.weights.regular_files import open_regular_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT_BYTES = 32
_SHORTEST_FILE_BYTES = 24
_MAX_DIMENSIONS = 4  # ggml's own limit
_MAX_ELEMENTS = 2**48


@dataclass(frozen=True, slots=True)
class SkippedStrings:
    """Stands for a string array that was not asked for."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: rows first, as torch counts; type_id: ggml's number of the storage format;
    offset_bytes: from the start of its file; file: which of the model's files that is."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int
    file: int = 0


class GgufFile(NamedTuple):
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """files: one, or all parts of a split model (`gguf_split.read_gguf_model`), whose metadata the first has.
    metadata_end: where that ends in its file, and the table of tensors begins."""

    files: tuple[GgufFile, ...]
    metadata: dict[str, Any]  # numeric arrays are numpy arrays, string arrays lists or SkippedStrings
    tensors: dict[str, GgufTensor]
    metadata_end: int = 0

    @property
    def path(self) -> Path:
        return self.files[0].path

    def fields(self) -> TypedFields:
        """The metadata as typed fields."""
        return TypedFields(self.metadata, self.path)


def read_gguf_header(path: Path, *, string_arrays: Collection[str] = ()) -> GgufHeader:
    """Metadata and tensor table of the one file `path`. Only the string arrays named in `string_arrays` are read.

    Raises ModelLoadError when the file cannot be opened, is no regular file, is not GGUF or ends inside its header,
    when a key or a tensor is there twice, and when tensors are misaligned or lie over each other. Whether a tensor's
    storage can be read, and whether the file holds all of it, is `storage_problem`'s to say.
    """
    with open_regular_file(path) as file:
        try:
            file_bytes = file.seek(0, 2)
            if file_bytes < _SHORTEST_FILE_BYTES:
                raise ModelLoadError(f"{path} is {file_bytes} bytes long, too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).header(string_arrays)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error


class _HeaderReader:
    """Walks the header; `position` is always at the next unread byte, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.num_bytes = len(data)
        self.position = 0

    def header(self, string_arrays: Collection[str]) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not b'GGUF'")
        self.position = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors, num_values = self._take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                raise ModelLoadError(f"{self.path} has the key {shown(key)} twice; keep one of the two")
            metadata[key] = self._value(key, self._take("I")[0], key in string_arrays)
        metadata_end = self.position
        entries: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            tensor = self._tensor()
            if tensor.name in entries:
                raise ModelLoadError(f"{self.path} has the tensor {shown(tensor.name)} twice; keep one of the two")
            entries[tensor.name] = tensor
        alignment = self._alignment(metadata)
        start = -(-self.position // alignment) * alignment
        tensors = {name: self._placed(tensor, start, alignment) for name, tensor in entries.items()}
        _refuse_overlaps(self.path, tensors.values())
        return GgufHeader((GgufFile(self.path, self.num_bytes),), metadata, tensors, metadata_end)

    def _take(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack("<" + codes, self._bytes(struct.calcsize("<" + codes)))

    def _bytes(self, length: int) -> bytes:
        end = self._end(length)
        value = self.data[self.position : end]
        self.position = end
        return value

    def _end(self, length: int) -> int:
        """Where the next `length` bytes end. A slice past the end of the file would be cut short silently."""
        if self.position + length > self.num_bytes:
            raise ModelLoadError(
                f"{self.path} is truncated: it ends inside its header, at {self.num_bytes} bytes; copy it again"
            )
        return self.position + length

    def _string(self) -> str:
        start = self.position
        try:
            return self._bytes(self._take("Q")[0]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"a string is not UTF-8 ({error})", start) from error

    def _damaged(self, why: str, position: int) -> ModelLoadError:
        return ModelLoadError(f"{self.path} has a damaged header near byte {position}: {why}; copy it again")

    def _value(self, key: str, type_id: int, keep_strings: bool) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(key, keep_strings)
        value = self._take(self._code(key, type_id))[0]
        return self._boolean(key, value) if type_id == _BOOL else value

    def _code(self, key: str, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise self._damaged(f"{shown(key)} is of type {type_id}, which GGUF does not have", self.position)
        return _SCALARS[type_id]

    def _boolean(self, key: str, value: int) -> bool:
        if value > 1:
            raise self._damaged(f"{shown(key)} is a truth value of {value}; it must be 0 or 1", self.position)
        return value == 1

    def _array(self, key: str, keep_strings: bool) -> Any:
        element_id, length = self._take("IQ")
        if element_id == _STRING:
            return self._strings(length) if keep_strings else self._skip_strings(length)
        if element_id == _ARRAY:
            raise self._damaged(f"{shown(key)} is an array of arrays, which no model needs", self.position)
        dtype = np.dtype(self._code(key, element_id)).newbyteorder("<")
        values = np.frombuffer(self._bytes(length * dtype.itemsize), dtype)
        if element_id == _BOOL:
            if values.size and values.max() > 1:
                self._boolean(key, int(values.max()))
            return values.view(np.bool_)
        return values

    def _strings(self, length: int) -> list[str]:
        # Each string takes at least the eight bytes that hold its length, so a damaged count cannot make this list
        # long.
        self._end(8 * length)
        return [self._string() for _ in range(length)]

    def _skip_strings(self, length: int) -> SkippedStrings:
        self._end(8 * length)
        data, position, last = self.data, self.position, self.num_bytes - 8
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if position > last:
                break
            position += 8 + unpack(data, position)[0]
        self.position = self._end(position - self.position)
        return SkippedStrings(length)

    def _tensor(self) -> GgufTensor:
        """A row of the table of tensors; its offset still counts from the start of the data."""
        start = self.position
        name = self._string()
        (num_dims,) = self._take("I")
        if num_dims > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {shown(name)} claims {num_dims} dimensions", start)
        shape = self._take("Q" * num_dims)[::-1]
        if prod(shape) > _MAX_ELEMENTS:
            raise self._damaged(f"tensor {shown(name)} claims the shape {list(shape)}", start)
        type_id, offset = self._take("IQ")
        return GgufTensor(name, shape, type_id, offset)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = TypedFields(metadata, self.path).integer(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT_BYTES, low=1)
        if alignment & (alignment - 1) or alignment > self.num_bytes:
            raise ModelLoadError(f"{self.path}: {_ALIGNMENT_KEY}={alignment}: must be a power of two, as 32 is")
        return alignment

    def _placed(self, tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
        if tensor.offset_bytes % alignment:
            raise ModelLoadError(
                f"{self.path}: tensor {shown(tensor.name)} lies at offset {tensor.offset_bytes}, which is no multiple "
                f"of the file's alignment, {alignment}; copy it again"
            )
        return GgufTensor(tensor.name, tensor.shape, tensor.type_id, start + tensor.offset_bytes)


def tensor_bytes(tensor: GgufTensor) -> int | None:
    """How many bytes of the file `tensor` takes; None where its storage format, or its shape in it, is not known."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError):
        return None
    if not tensor.shape or tensor.shape[-1] % block_elements:
        return None
    return prod(tensor.shape) // block_elements * block_bytes


def _refuse_overlaps(path: Path, tensors: Iterable[GgufTensor]) -> None:
    """Raise where a byte of the file belongs to two tensors. Tensors in unknown formats are skipped: `storage_problem`
    tells of them."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset_bytes):
        if tensor.offset_bytes < end:
            raise ModelLoadError(
                f"{path}: tensor {shown(tensor.name)} begins at byte {tensor.offset_bytes}, inside of {shown(before)}, "
                f"which ends at byte {end}; copy the file again"
            )
        num_bytes = tensor_bytes(tensor)
        if num_bytes:
            end, before = tensor.offset_bytes + num_bytes, tensor.name
