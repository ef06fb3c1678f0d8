"""Checks of what is handed to a kernel: it reads memory by address, and cannot notice a wrong shape itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lamella.errors import ConfigError, InvariantError
from lamella.native.library import NativeLibrary, load_library


def require_library() -> NativeLibrary:
    """Raises ConfigError where there is no build for this processor; ask `load_library` first."""
    library = load_library()
    if library is None:
        raise ConfigError(
            "there are no native kernels for this processor, or LAMELLA_NATIVE=0 switches them off; "
            "install lamella where there is a C++ compiler, or use the torch path"
        )
    return library


def check_rows(name: str, rows: Tensor, width: int, *, is_written: bool = False) -> None:
    """`rows` is float32 [T, width] on the CPU; rows may have a stride, the values of one lie side by side.

    is_written: rows must not share memory, as those of an expanded tensor do.
    """
    if rows.dtype is not torch.float32:
        raise InvariantError(f"{name} has dtype {rows.dtype}; the native kernels take torch.float32")
    if rows.dim() != 2 or rows.shape[1] != width:
        raise InvariantError(f"{name} has shape {list(rows.shape)}; it must be [tokens, {width}]")
    if rows.stride(1) != 1 and width > 1:
        raise InvariantError(f"{name} has strides {rows.stride()}; the values of a row must lie side by side")
    if is_written and rows.stride(0) < width and rows.shape[0] > 1:
        raise InvariantError(f"{name} has strides {rows.stride()}; rows of {width} that are written must not overlap")
    check_device(name, rows)


def check_vector(name: str, vector: Tensor, width: int, dtype: torch.dtype = torch.float32) -> None:
    """`vector` is `dtype` [width] on the CPU, contiguous."""
    if vector.dtype is not dtype:
        raise InvariantError(f"{name} has dtype {vector.dtype}; it must be {dtype}")
    if vector.dim() != 1 or vector.shape[0] != width:
        raise InvariantError(f"{name} has shape {list(vector.shape)}; it must be [{width}]")
    check_contiguous(name, vector)
    check_device(name, vector)


def check_panels(name: str, panels: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`panels` is a weight's memory: `dtype` of `shape` on the CPU, contiguous."""
    if panels.dtype is not dtype:
        raise InvariantError(f"{name} has dtype {panels.dtype}; it must be {dtype}")
    if tuple(panels.shape) != shape:
        raise InvariantError(f"{name} has shape {list(panels.shape)}; it must be {list(shape)}")
    check_contiguous(name, panels)
    check_device(name, panels)


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InvariantError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def check_indices(name: str, indices: Tensor, num_rows: int, *, first: int, stop: int) -> None:
    """`indices` is int64 [num_rows] on the CPU, contiguous, and each lies in [first, stop)."""
    check_vector(name, indices, num_rows, torch.int64)
    if num_rows:
        values = indices.numpy()  # NumPy finds least and largest of a few values in a tenth of torch's time
        lowest, highest = int(values.min()), int(values.max())
        if lowest < first or highest >= stop:
            wrong = lowest if lowest < first else highest
            at = int((values == wrong).argmax())
            raise InvariantError(f"{name}[{at}] is {wrong}; it must lie in [{first}, {stop})")


def rotary_or_empty(cos: Tensor | None, sin: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The tables of rotary embedding as they are, or where both are None tables without columns, which turn nothing."""
    if cos is None and sin is None:
        empty = torch.empty(num_tokens, 0)
        return empty, empty
    if cos is None or sin is None:
        raise InvariantError(f"{'cos' if cos is None else 'sin'} is None and the other is not; give both or neither")
    return cos, sin


def check_device(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise InvariantError(f"{name} is on {tensor.device}; the native kernels run on the CPU")
