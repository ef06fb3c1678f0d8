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


def check_rows(name: str, rows: Tensor, width: int) -> None:
    """`rows` is float32 [T, width] on the CPU; rows may have a stride, the values of one lie side by side."""
    if rows.dtype is not torch.float32:
        raise InvariantError(f"{name} has dtype {rows.dtype}; the native kernels take torch.float32")
    if rows.dim() != 2 or rows.shape[1] != width:
        raise InvariantError(f"{name} has shape {list(rows.shape)}; it must be [tokens, {width}]")
    if rows.stride(1) != 1 and width > 1:
        raise InvariantError(f"{name} has strides {rows.stride()}; the values of a row must lie side by side")
    _check_device(name, rows)


def check_vector(name: str, vector: Tensor, width: int, dtype: torch.dtype = torch.float32) -> None:
    """`vector` is `dtype` [width] on the CPU, contiguous."""
    if vector.dtype is not dtype:
        raise InvariantError(f"{name} has dtype {vector.dtype}; it must be {dtype}")
    if vector.dim() != 1 or vector.shape[0] != width:
        raise InvariantError(f"{name} has shape {list(vector.shape)}; it must be [{width}]")
    check_contiguous(name, vector)
    _check_device(name, vector)


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InvariantError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def _check_device(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise InvariantError(f"{name} is on {tensor.device}; the native kernels run on the CPU")
