"""A split GGUF model as one file, for readers that take one alone."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.weights.gguf_header import GgufHeader, GgufTensor, tensor_bytes
from lamella.model_executor.weights.regular_files import open_regular_file

_FIXED_BYTES = 24  # magic, version, number of tensors and of metadata
_ALIGNMENT_BYTES = 32  # a multiple of it does for every reader that the format's default does for
_ALIGNMENT_KEY = "general.alignment"


@contextmanager
def joined_file(header: GgufHeader, *, has_data: bool) -> Iterator[Path]:
    """The model's one file, or a temporary one that all parts are joined to, the first one's metadata as it stands.

    has_data: else a joined file has a hole where the tensors would be, for readers of metadata and names.
    Raises ModelLoadError: a tensor in a format of unknown size, files that cannot be read, no room for the joined one.
    """
    if len(header.files) == 1:
        yield header.path
        return
    folder = None
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix="lamella-gguf-"))
            _write(header, folder / header.path.name, has_data)
        except OSError as error:
            raise ModelLoadError(f"{header.path}: its parts cannot be joined in a temporary file: {error}") from error
        yield folder / header.path.name
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _write(header: GgufHeader, path: Path, has_data: bool) -> None:
    alignment = header.fields().integer(_ALIGNMENT_KEY, _ALIGNMENT_BYTES, low=1)
    sizes = {tensor.name: _size(header, tensor) for tensor in header.tensors.values()}
    with path.open("wb") as out, open_regular_file(header.path) as first:
        fixed = first.read(_FIXED_BYTES)
        num_values = struct.unpack_from("<Q", fixed, _FIXED_BYTES - 8)[0]
        out.write(fixed[:8] + struct.pack("<QQ", len(header.tensors), num_values))
        _copy(header.path, first, _FIXED_BYTES, header.metadata_end - _FIXED_BYTES, out)
        offset = 0
        for tensor in header.tensors.values():
            out.write(_table_entry(tensor, offset))
            offset += ceil_div(sizes[tensor.name], alignment) * alignment
        start = ceil_div(out.tell(), alignment) * alignment
        out.truncate(start + offset)
    if not has_data:
        return
    with path.open("r+b") as out:
        for index, (part, _) in enumerate(header.files):
            place = start
            with open_regular_file(part) as stored:
                for tensor in header.tensors.values():
                    if tensor.file == index:
                        out.seek(place)
                        _copy(part, stored, tensor.offset_bytes, sizes[tensor.name], out)
                    place += ceil_div(sizes[tensor.name], alignment) * alignment


def _size(header: GgufHeader, tensor: GgufTensor) -> int:
    num_bytes = tensor_bytes(tensor)
    if num_bytes is None:
        raise ModelLoadError(
            f"{header.path}: {tensor.name} is stored in ggml type {tensor.type_id}, which is not known"
        )
    return num_bytes


def _table_entry(tensor: GgufTensor, offset: int) -> bytes:
    name, shape = tensor.name.encode("utf-8"), tensor.shape[::-1]
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type_id, offset)
    return struct.pack("<Q", len(name)) + name + numbers


def _copy(path: Path, source: IO[bytes], start: int, num_bytes: int, to: IO[bytes]) -> None:
    source.seek(start)
    left = num_bytes
    while left:
        piece = source.read(min(left, 1 << 24))
        if not piece:
            raise ModelLoadError(f"{path} ends before its tensors do (truncated: copy it again)")
        to.write(piece)
        left -= len(piece)
