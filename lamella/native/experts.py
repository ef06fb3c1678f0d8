"""Experts by the native kernels: which a token takes, and their products, row by row the same bits in any company.

Structures mirror those of csrc/routing.h and csrc/experts.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamella.errors import ConfigError
from lamella.native.arguments import check_contiguous, check_rows, check_vector, require_library
from lamella.native.layer_linear import LinearLayer, LinearStructure
from lamella.native.library import Float, Int, Pointer
from lamella.native.mlp import Gate, GatedMLP, GateStructure, check_mlp

SCORINGS = ("softmax", "sigmoid", "sparse_mixer")  # by their numbers in csrc/routing.h


class _RoutingStructure(ctypes.Structure):
    _fields_ = (
        ("scoring", Int),
        ("num_experts", Int),
        ("top_k", Int),
        ("num_groups", Int),
        ("num_chosen_groups", Int),
        ("correction", Pointer),
        ("expert_scale", Pointer),
        ("logit_cap", Float),
        ("is_renormalised", Int),
        ("renormalised_floor", Float),
        ("scale", Float),
        ("jitter", Float),
    )


class _ExpertsStructure(ctypes.Structure):
    _fields_ = (
        ("router", LinearStructure),
        ("routing", _RoutingStructure),
        ("gate_up_projs", Pointer),
        ("down_projs", Pointer),
        ("gate", GateStructure),
        ("scales_input", Int),
        ("shared", Pointer),
        ("shared_gate", Pointer),
        ("meter", Pointer),
    )


class RoutingRule(NamedTuple):
    """From logits to experts and weights, as `model_executor.models.mlp_config.RouterConfig` has it; what is None there
    is 0 here. correction, expert_scale: float32 [num_experts]."""

    scoring: str
    num_experts: int
    top_k: int
    num_groups: int = 1
    num_chosen_groups: int = 1
    correction: Tensor | None = None
    expert_scale: Tensor | None = None
    logit_cap: float = 0.0
    is_renormalised: bool = False
    renormalised_floor: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0

    def structure(self) -> _RoutingStructure:
        """Raises ConfigError for a rule that gives no token its experts."""
        if self.scoring not in SCORINGS:
            raise ConfigError(f"scoring={self.scoring!r} is not known; choose one of {', '.join(SCORINGS)}")
        groups, size = self.num_groups, self.num_experts // max(self.num_groups, 1)
        if groups < 1 or size * groups != self.num_experts or (groups > 1 and size < 2):
            raise ConfigError(
                f"num_groups={groups} does not divide num_experts={self.num_experts} into groups of 2 or more; a "
                "divisor up to half of it does"
            )
        if not 1 <= self.num_chosen_groups <= groups:
            raise ConfigError(f"num_chosen_groups={self.num_chosen_groups} must be from 1 to num_groups={groups}")
        most = size * self.num_chosen_groups
        if not 1 <= self.top_k <= most:
            raise ConfigError(f"top_k={self.top_k} must be from 1 to {most}, the experts that can be chosen")
        for name, vector in (("correction", self.correction), ("expert_scale", self.expert_scale)):
            if vector is not None:
                check_vector(name, vector, self.num_experts)
        return _RoutingStructure(
            SCORINGS.index(self.scoring),
            self.num_experts,
            self.top_k,
            groups,
            self.num_chosen_groups,
            None if self.correction is None else self.correction.data_ptr(),
            None if self.expert_scale is None else self.expert_scale.data_ptr(),
            self.logit_cap,
            self.is_renormalised,
            self.renormalised_floor,
            self.scale,
            self.jitter,
        )


class _Functions(NamedTuple):
    experts: Callable[..., None]
    route: Callable[..., None]


@functools.cache
def _functions() -> _Functions:
    library = require_library()
    return _Functions(
        library.function("experts", Pointer, Pointer, Pointer, Int, Pointer),
        library.function("route", Pointer, Pointer, Int, Pointer, Pointer),
    )


class Experts:
    """What a layer has in place of an MLP: [T, width] -> [T, width]."""

    def __init__(
        self,
        router: LinearLayer,
        rule: RoutingRule,
        gate_up_projs: Sequence[LinearLayer],
        down_projs: Sequence[LinearLayer],
        gate: Gate,
        *,
        scales_input: bool = False,
        shared: GatedMLP | None = None,
        shared_gate: LinearLayer | None = None,
    ) -> None:
        """router: as many outputs as there are experts. *_projs: of each expert, all of the same sizes. scales_input:
        a token's weight multiplies what the expert takes, else what it gives. shared: what every token goes through,
        multiplied with the sigmoid of shared_gate's one output.

        Raises ConfigError for layers that do not fit each other.
        """
        count, width = rule.num_experts, router.num_in
        if (router.num_out, len(gate_up_projs), len(down_projs)) != (count, count, count):
            raise ConfigError(
                f"{count} experts were given {router.num_out} logits, {len(gate_up_projs)} gate_up_projs and "
                f"{len(down_projs)} down_projs; there must be {count} of each"
            )
        sizes = {(each.num_in, each.num_out) for each in down_projs}
        if len(sizes) > 1:
            raise ConfigError(f"down_projs have sizes {sorted(sizes)}; experts are of one size")
        for gate_up_proj, down_proj in zip(gate_up_projs, down_projs, strict=True):
            check_mlp(gate_up_proj, down_proj)
        widths = {down_projs[0].num_out, *([] if shared is None else [shared.width])}
        if shared_gate is not None:
            widths.add(shared_gate.num_in)
            if shared is None or shared_gate.num_out != 1:
                raise ConfigError(f"shared_gate has {shared_gate.num_out} outputs; it has 1, beside a shared MLP")
        if widths != {width}:
            raise ConfigError(f"the router takes {width} inputs and the experts {sorted(widths)}; they take the same")
        self.width, self.num_experts = width, count
        # Their memory is what the addresses are of.
        self._kept = (router, rule, tuple(gate_up_projs), tuple(down_projs), shared, shared_gate)
        self._gate_up_projs = (LinearStructure * count)(*(each.structure for each in gate_up_projs))
        self._down_projs = (LinearStructure * count)(*(each.structure for each in down_projs))
        self._structure = _ExpertsStructure(
            router.structure,
            rule.structure(),
            ctypes.addressof(self._gate_up_projs),
            ctypes.addressof(self._down_projs),
            gate.structure(),
            scales_input,
            None if shared is None else ctypes.addressof(shared.structure),
            None if shared_gate is None else ctypes.addressof(shared_gate.structure),
            None,
        )
        self._meter: Tensor | None = None
        self.address = ctypes.addressof(self._structure)
        self._call = _functions().experts

    def measure(self) -> Tensor:
        """From now on, add up what these experts take in every call, inside of a model's layers too: int64
        [2 + num_experts], which is returned: nanoseconds of the wall clock, nanoseconds of the calling thread's
        processor time, and for each expert how often its weights were passed over."""
        self._meter = torch.zeros(2 + self.num_experts, dtype=torch.int64)
        self._structure.meter = self._meter.data_ptr()
        return self._meter

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """`x` contiguous float32 [T, width] -> [T, width]. A row's result does not depend on the others. routed: as x,
        what the router reads; None: x."""
        routed = x if routed is None else routed
        for name, rows in (("x", x), ("routed", routed)):
            check_rows(name, rows, self.width)
            check_contiguous(name, rows)
        if len(routed) != len(x):
            raise ConfigError(f"routed has {len(routed)} rows; x has {len(x)}")
        out = torch.empty_like(x)
        if len(x):
            self._call(self.address, x.data_ptr(), routed.data_ptr(), len(x), out.data_ptr())
        return out


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """logits float32 [T, num_experts] -> (ids int64, weights float32), each [T, top_k], best first; the lowest id among
    equals."""
    check_rows("logits", logits, rule.num_experts)
    structure, logits = rule.structure(), logits.clone(memory_format=torch.contiguous_format)
    ids = torch.empty(len(logits), rule.top_k, dtype=torch.int64)
    weights = torch.empty(len(logits), rule.top_k)
    _functions().route(ctypes.addressof(structure), logits.data_ptr(), len(logits), ids.data_ptr(), weights.data_ptr())
    return ids, weights
