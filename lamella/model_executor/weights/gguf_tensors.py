"""The tensors of a GGUF file as torch sees them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamella.model_executor.weights.gguf_header import GgufHeader, GgufTensor, tensor_bytes
from lamella.model_executor.weights.regular_files import open_regular_file

_UNQUANTISED: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


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
    num_bytes = tensor_bytes(tensor)
    if len(tensor.shape) not in (1, 2, 3) or not num_bytes:
        return f"{tensor.name}: shape {list(tensor.shape)} is not made of rows of whole {block_elements}-element blocks"
    end = tensor.offset_bytes + num_bytes
    file_bytes = header.files[tensor.file].num_bytes
    if end > file_bytes:
        return (
            f"{tensor.name}: its data ends at byte {end} but the file is {file_bytes} bytes long (truncated: copy it "
            "again)"
        )
    return None


def _mapped(path: Path) -> np.ndarray:
    with open_regular_file(path) as file:
        # The mapping outlives the file's handle.
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class GgufTensorData:
    """Reads rows of tensors that `storage_problem` has nothing against."""

    def __init__(self, header: GgufHeader) -> None:
        self._files = [_mapped(path) for path, _ in header.files]
        self._tensors = header.tensors

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) along the first dimension: float16 where stored so, else float32. A copy. Of a tensor
        of three dimensions, which is a stack of matrices, rows count from the first matrix to the last."""
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
        raw = self._files[tensor.file][tensor.offset_bytes + start * row_bytes : tensor.offset_bytes + stop * row_bytes]
        return raw.reshape(stop - start, row_bytes)

    def type_name(self, name: str) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self._tensors[name].type_id).name
