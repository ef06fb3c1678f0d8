"""Building blocks in eager PyTorch: plain functions on tensors.

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


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [T, 2 * width], gate first -> activation(gate) * up, [T, width]. activation: "gelu_tanh" or "silu"."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated.mul_(up)
