"""Building blocks in eager PyTorch: plain functions on tensors.

All weights are [out, in]. Norm weights are effective multipliers (a checkpoint's 1 + w is added once,
when it is loaded) and float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from lamella.model_executor.models.mlp_config import GateClamp

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
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


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension, computed in float32."""
    return functional.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation: one of ACTIVATIONS; a new tensor."""
    return ACTIVATIONS[activation](x)


def gated_activation(gate_up: torch.Tensor, activation: str, clamp: GateClamp | None = None) -> torch.Tensor:
    """gate_up [T, 2 * width], gate first -> activation(gate) * up, [T, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is None:
        return activated(gate, activation).mul_(up)
    if not clamp.after_activation:
        gate = gate.clamp(max=clamp.limit)
    gate = gate * torch.sigmoid(gate * clamp.slope) if activation == "silu" else activated(gate, activation)
    if clamp.after_activation:
        gate = gate.clamp(max=clamp.limit)
    return gate * (up.clamp(-clamp.limit, clamp.limit) + clamp.up_offset)


def attention_gate(attended: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """attended [T, width] * activation(gate), gate [T, heads] or [T, width]. activation: "sigmoid" or "softplus",
    computed in float32."""
    opened = (gate.float().sigmoid() if activation == "sigmoid" else functional.softplus(gate.float())).to(gate.dtype)
    heads = attended.unflatten(1, (gate.shape[1], -1))  # of one element where each has a gate of its own
    return (heads * opened.unsqueeze(-1)).flatten(1)
