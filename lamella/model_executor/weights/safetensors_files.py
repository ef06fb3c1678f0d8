"""The headers of safetensors files, checked before anything is mapped, and a writer that streams.

Format: an 8-byte little-endian length, that many bytes of JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields, is_text, shown
from lamella.model_executor.models.typed_json import parse_json_object
from lamella.model_executor.weights.regular_files import open_regular_file

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL_DTYPES = {**DTYPES, "I8": torch.int8, "I32": torch.int32}  # those of converted weights, too
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT_BYTES = 64  # a cache line, for the kernels that read the mapped file
_METADATA = "__metadata__"
# Every dtype of the format; tensors of most of them are known only so far that the file can be checked.
_DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """dtype_name as the file spells it; see DTYPES for the ones that can be used. begin, end: bytes of the data."""

    shape: tuple[int, ...]
    dtype_name: str
    begin: int = 0
    end: int = 0


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Every tensor in `path`. They lie one behind the other, each as long as its shape says, to the file's last byte.

    Raises ModelLoadError when the file cannot be opened, is no regular file, is not safetensors or is truncated.
    """
    with open_regular_file(path) as file:
        try:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelLoadError(f"{path} is {file_bytes} bytes long, too short for a safetensors file")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise ModelLoadError(
                    f"{path} is truncated, or not a safetensors file: its header claims {header_bytes} bytes"
                )
            text = file.read(header_bytes)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    try:
        header = parse_json_object(text, path)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path} is not a safetensors file: its header {error}") from error
    if _METADATA in header:
        metadata = header.object(_METADATA)
        for key in metadata:
            metadata.string(key)
    entries = {name: _entry(header, name) for name in header if name != _METADATA}
    _check_places(path, entries, 8 + header_bytes, file_bytes)
    return entries


def _entry(header: TypedFields, name: str) -> SafetensorsEntry:
    if not is_text(name):
        raise ModelLoadError(f"{header.place} has a tensor named {shown(name)}, which is no valid Unicode")
    fields = header.object(name)
    dtype_name = fields.string("dtype", choices=tuple(_DTYPE_BITS))
    shape = fields.integers("shape")
    offsets = fields.integers("data_offsets")
    num_bits = prod(shape) * _DTYPE_BITS[dtype_name]
    if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != num_bits:
        raise fields.error("data_offsets", f"a begin and an end, {num_bits / 8:g} bytes apart for {list(shape)}")
    return SafetensorsEntry(shape, dtype_name, *offsets)


def _check_places(path: Path, entries: Mapping[str, SafetensorsEntry], data_start: int, file_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ModelLoadError(
                f"{path}: tensor {shown(name)} begins at byte {entry.begin} of the data, where the tensor before it "
                f"ends at {end}; they must lie one behind the other"
            )
        end = entry.end
    wanted_bytes = data_start + end
    if file_bytes != wanted_bytes:
        cut = " (truncated: copy it again)" if file_bytes < wanted_bytes else ""
        raise ModelLoadError(f"{path} is {file_bytes} bytes long, but its header describes {wanted_bytes}{cut}")


def write_safetensors_header(file: BinaryIO, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Write the header of a file whose tensors (name -> shape, dtype) follow in this order, without gaps.

    Put wider dtypes first, so that every tensor is aligned to its own element.
    """
    names = {dtype: name for name, dtype in ALL_DTYPES.items()}
    header, offset = {}, 0
    for name, (shape, dtype) in tensors.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    file.write(struct.pack("<Q", len(text)) + text)
