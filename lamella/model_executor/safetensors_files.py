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

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL_DTYPES = {**DTYPES, "I8": torch.int8, "I32": torch.int32}  # those of converted weights, too
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT_BYTES = 64  # a cache line, for the kernels that read the mapped file


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """dtype_name as the file spells it; see DTYPES for the ones that can be used."""

    shape: tuple[int, ...]
    dtype_name: str


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Every tensor in `path`. The file is as long as its header says, to the byte.

    Raises ModelLoadError when the file cannot be opened, is not safetensors or is truncated.
    """
    try:
        with path.open("rb") as file:
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
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not JSON") from error
    try:
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        entries = {name: SafetensorsEntry(tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file: its header lacks {error}") from error
    wanted_bytes = 8 + header_bytes + max(ends, default=0)
    if file_bytes != wanted_bytes:
        cut = " (truncated: copy it again)" if file_bytes < wanted_bytes else ""
        raise ModelLoadError(f"{path} is {file_bytes} bytes long, but its header describes {wanted_bytes}{cut}")
    return entries


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
