"""Building blocks of the models: plain functions on tensors.

All weights are [out, in]. Norm weights are effective multipliers (a checkpoint's 1 + w is added once,
when it is loaded) and float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# Row counts where weight @ x.T beats x @ weight.T on CPU (MKL, fp32; see docs/benchmarks.md).
CPU_SWAPPED_ROWS = range(3, 129)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] @ weight.T -> [T, out]. For a few rows on CPU the result is a transposed view."""
    if x.device.type == "cpu" and x.shape[0] in CPU_SWAPPED_ROWS:
        return torch.mm(weight, x.t()).t()
    return functional.linear(x, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotary_tables(
    positions: torch.Tensor, head_dim: int, theta: float, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [T, 1, head_dim / 2] in `dtype`, for positions [T] (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    inverse_frequency = 1.0 / (theta**exponents) / scale
    angles = positions.float()[:, None] * inverse_frequency[None, :]
    return angles.cos()[:, None, :].to(dtype), angles.sin()[:, None, :].to(dtype)


def apply_rotary(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [T, heads, head_dim], first half against second half of each head."""
    cos, sin = tables
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gated_gelu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * width], gate first -> gelu_tanh(gate) * up, [T, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
