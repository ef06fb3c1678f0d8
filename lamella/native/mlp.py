"""A gated MLP for the native kernels, as one layer of `LayerTail` or beside experts.

Structures mirror those of csrc/kernels.h and csrc/experts.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lamella.errors import ConfigError, InvariantError
from lamella.native.arguments import check_rows, require_library
from lamella.native.elementwise import ACTIVATIONS
from lamella.native.layer_linear import LinearLayer, LinearStructure
from lamella.native.library import Float, Int, Pointer


class GateStructure(ctypes.Structure):
    _fields_ = (
        ("activation", Int),
        ("limit", Float),
        ("limits_activated", Int),
        ("slope", Float),
        ("up_offset", Float),
    )


class MLPStructure(ctypes.Structure):
    _fields_ = (("gate_up_proj", LinearStructure), ("down_proj", LinearStructure), ("gate", GateStructure))


class Gate(NamedTuple):
    """activation(gate) * up. activation: one of ACTIVATIONS.

    limit: up lies in [-limit, limit] and the gate is at most that, before the activation, or behind it with
    limits_activated; 0: no bounds. slope: of silu, g * sigmoid(slope * g); up_offset is added to up behind its bounds:
    both only with a limit.
    """

    activation: str
    limit: float = 0.0
    limits_activated: bool = False
    slope: float = 1.0
    up_offset: float = 0.0

    def structure(self) -> GateStructure:
        """Raises ConfigError for an activation that is not known, and for slope and offset without a limit."""
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
        if self.limit < 0 or (self.limit == 0 and (self.slope, self.up_offset) != (1.0, 0.0)):
            raise ConfigError(
                f"limit={self.limit} does not go with slope={self.slope} and up_offset={self.up_offset}; these take a "
                "positive limit"
            )
        number = ACTIVATIONS.index(self.activation)
        return GateStructure(number, self.limit, self.limits_activated, self.slope, self.up_offset)


class GatedMLP:
    """down(gate(gate_up(x))): [T, width] -> [T, width]."""

    def __init__(self, gate_up_proj: LinearLayer, down_proj: LinearLayer, gate: Gate) -> None:
        """gate_up_proj: the gate's outputs, then up's. Raises ConfigError for layers that do not follow each other."""
        check_mlp(gate_up_proj, down_proj)
        self.width = down_proj.num_out
        self._kept = (gate_up_proj, down_proj)  # their memory is what the addresses are of
        self.structure = MLPStructure(gate_up_proj.structure, down_proj.structure, gate.structure())


def check_mlp(gate_up_proj: LinearLayer, down_proj: LinearLayer) -> None:
    width, mlp_width = down_proj.num_out, down_proj.num_in
    if (gate_up_proj.num_in, gate_up_proj.num_out) != (width, 2 * mlp_width):
        raise ConfigError(
            f"layers {gate_up_proj.num_in} -> {gate_up_proj.num_out} and {mlp_width} -> {width} do not follow each "
            f"other; an MLP on {width} of {mlp_width} has {width} -> {2 * mlp_width} and {mlp_width} -> {width}"
        )


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function("gated_clamped", Pointer, Pointer, Int, Int, Int, Pointer)


def clamped_activation(gate_up: Tensor, gate: Gate) -> Tensor:
    """gate_up float32 [T, 2 * width], the gate's columns first -> [T, width]. gate.limit must be positive."""
    width = gate_up.shape[-1] // 2
    check_rows("gate_up", gate_up, 2 * width)
    if gate.limit <= 0:
        raise InvariantError(f"gate.limit is {gate.limit}; it must be positive, or use gated_activation")
    structure, out = gate.structure(), torch.empty(len(gate_up), width)
    _function()(ctypes.addressof(structure), gate_up.data_ptr(), gate_up.stride(0), len(gate_up), width, out.data_ptr())
    return out
