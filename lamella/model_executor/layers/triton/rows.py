"""What the kernels have in common: matrices of rows, and how many warps work on a block."""

from __future__ import annotations

from typing import Any

import torch

from lamella.errors import InvariantError

ELEMENTS_PER_WARP = 256  # 8 for each of 32 threads: one 16-byte load of a 16-bit dtype
MAX_WARPS = 16


def check_rows(name: str, x: torch.Tensor, width: int | None = None) -> None:
    """Whether `x` is [rows, width] with each row's elements side by side; rows may lie apart. `width` None: any.

    Raises InvariantError. (A kernel would read the wrong elements, and would not say so.)
    """
    if x.dim() != 2 or (width is not None and x.shape[1] != width):
        wanted = "any width" if width is None else str(width)
        raise InvariantError(f"{name} has shape {list(x.shape)}; the kernels take [rows, {wanted}]")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise InvariantError(f"{name} has strides {x.stride()}; the elements of a row must be adjacent")


def check_bias(name: str, bias: torch.Tensor | None, width: int) -> None:
    """Whether `bias` is None, or [width] of a float dtype with its elements side by side. Raises InvariantError."""
    if bias is not None and (tuple(bias.shape) != (width,) or not bias.is_contiguous() or not bias.is_floating_point()):
        raise InvariantError(
            f"{name} is {bias.dtype} {list(bias.shape)}; the kernels take contiguous floats [{width}], or None"
        )


def launch_options(block: int) -> dict[str, Any]:
    """What the compiler is told about programs of `block` elements, a power of two. Fused multiply-add is spelled out:
    its default differs between versions."""
    return {"num_warps": min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)), "enable_fp_fusion": True}
