"""The header of a GGUF file, and its tensors as torch sees them.

The `gguf` package's reader makes an object of every vocabulary entry (seconds for 262,144 of them), so the
header is read here; only the arithmetic of the quantised formats is taken from the package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamella.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT_BYTES = 32
_UNQUANTISED: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class SkippedStrings:
    """Stands for a string array that was not asked for."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: rows first, as torch counts; type_id: ggml's number of the storage format;
    offset_bytes: from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    file_bytes: int
    metadata: dict[str, Any]  # numeric arrays are numpy arrays, string arrays lists or SkippedStrings
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, *, string_arrays: Collection[str] = ()) -> GgufHeader:
    """Metadata and tensor table of `path`. Only the string arrays named in `string_arrays` are read.

    Raises ModelLoadError when the file cannot be opened, is not GGUF, or ends inside its header.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            if file_bytes < 24:
                raise ModelLoadError(f"{path} is {file_bytes} bytes long, too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).header(string_arrays)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


class _HeaderReader:
    """Walks the header; `position` is always at the next unread byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self, string_arrays: Collection[str]) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not b'GGUF'")
        try:
            return self._header(string_arrays)
        except struct.error as error:
            raise ModelLoadError(
                f"{self.path} is truncated: it ends inside its header, at {len(self.data)} bytes; copy it again"
            ) from error
        except (UnicodeDecodeError, KeyError) as error:
            raise ModelLoadError(f"{self.path} has a damaged header near byte {self.position}: {error}") from error

    def _header(self, string_arrays: Collection[str]) -> GgufHeader:
        self.position = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors, num_values = self._take("QQ")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0], key in string_arrays)
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{self.path} has general.alignment={alignment!r}; must be a positive integer")
        start = -(-self.position // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, type_id, start + offset) for name, shape, type_id, offset in entries}
        return GgufHeader(self.path, len(self.data), metadata, tensors)

    def _take(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + codes, self.data, self.position)
        self.position += struct.calcsize("<" + codes)
        return values

    def _bytes(self, length: int) -> bytes:
        # A slice past the end would be cut short silently.
        if self.position + length > len(self.data):
            raise struct.error("past the end")
        value = self.data[self.position : self.position + length]
        self.position += length
        return value

    def _string(self) -> str:
        return self._bytes(self._take("Q")[0]).decode("utf-8")

    def _value(self, type_id: int, keep_strings: bool) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id != _ARRAY:
            return self._take(_SCALARS[type_id])[0]
        element_id, length = self._take("IQ")
        if element_id == _STRING:
            return self._strings(length) if keep_strings else self._skip_strings(length)
        if element_id == _ARRAY:
            return [self._value(_ARRAY, keep_strings) for _ in range(length)]
        dtype = np.dtype(_SCALARS[element_id]).newbyteorder("<")
        return np.frombuffer(self._bytes(length * dtype.itemsize), dtype)

    def _strings(self, length: int) -> list[str]:
        data, position = self.data, self.position
        unpack = struct.Struct("<Q").unpack_from
        values = []
        for _ in range(length):
            end = position + 8 + unpack(data, position)[0]
            values.append(data[position + 8 : end].decode("utf-8"))
            position = end
        self.position = position
        self._bytes(0)
        return values

    def _skip_strings(self, length: int) -> SkippedStrings:
        data, position = self.data, self.position
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(length):
            position += 8 + unpack(data, position)[0]
        self.position = position
        self._bytes(0)
        return SkippedStrings(length)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._take("I")
        if num_dims > 8:
            raise ModelLoadError(f"{self.path}: tensor {name!r} claims {num_dims} dimensions, so the header is damaged")
        shape = self._take("Q" * num_dims)[::-1]
        return name, shape, *self._take("IQ")


def storage_problem(header: GgufHeader, tensor: GgufTensor) -> str | None:
    """Why the values of `tensor` cannot be read (format, truncation), or None when they can."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        storage = GGMLQuantizationType(tensor.type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[storage]
        if tensor.type_id not in _UNQUANTISED:
            dequantize(np.zeros((1, block_bytes), np.uint8), storage)
    except (ValueError, KeyError, NotImplementedError):
        return f"{tensor.name}: stored in ggml type {tensor.type_id}, which the gguf package cannot convert"
    if len(tensor.shape) not in (1, 2) or tensor.shape[-1] % block_elements:
        return f"{tensor.name}: shape {list(tensor.shape)} is not made of rows of whole {block_elements}-element blocks"
    end = tensor.offset_bytes + prod(tensor.shape) // block_elements * block_bytes
    if end > header.file_bytes:
        return (
            f"{tensor.name}: its data ends at byte {end} but the file is {header.file_bytes} bytes long (truncated: "
            "copy it again)"
        )
    return None


class GgufTensorData:
    """Reads rows of tensors that `storage_problem` has nothing against."""

    def __init__(self, header: GgufHeader) -> None:
        self._data = np.memmap(header.path, np.uint8, "r")
        self._tensors = header.tensors

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) along the first dimension: float16 where stored so, else float32. A copy."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        # A vector is one row of blocks, and is read whole.
        first, last = (0, 1) if len(tensor.shape) == 1 else (start, stop)
        raw = self.read_blocks(name, first, last)
        if tensor.type_id in _UNQUANTISED:
            values = raw.view(_UNQUANTISED[tensor.type_id]).copy()
        else:
            values = dequantize(raw, GGMLQuantizationType(tensor.type_id))
        rows = torch.from_numpy(values)
        return rows.flatten()[start:stop] if len(tensor.shape) == 1 else rows.view(last - first, tensor.shape[-1])

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as they are stored: uint8 [n, bytes of a row]; a view of the file. A vector is one row."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        row_bytes = tensor.shape[-1] // block_elements * block_bytes
        raw = self._data[tensor.offset_bytes + start * row_bytes : tensor.offset_bytes + stop * row_bytes]
        return raw.reshape(stop - start, row_bytes)

    def type_name(self, name: str) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self._tensors[name].type_id).name
