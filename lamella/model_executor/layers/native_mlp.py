"""The feed-forward part of a described layer, as the native kernels take it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamella.errors import ConfigError
from lamella.model_executor.layers.description import DenseMLP, Experts, Projection
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.native import experts as native
from lamella.native.experts import RoutingRule
from lamella.native.layer_linear import LinearLayer
from lamella.native.library import PANEL
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate, GatedMLP

# Projection, first output, last output + 1 -> the layer of these outputs.
Layers = Callable[[Projection, int, int], LinearLayer]


def native_mlp(mlp: DenseMLP | Experts, layers: Layers) -> GatedMLP | native.Experts:
    """mlp: gated."""
    return gated_mlp(mlp, layers) if isinstance(mlp, DenseMLP) else native_experts(mlp, layers)


def gated_mlp(mlp: DenseMLP, layers: Layers) -> GatedMLP:
    gate_up_proj, down_proj = mlp.gate_up_proj, mlp.down_proj
    return GatedMLP(
        layers(gate_up_proj, 0, gate_up_proj.num_out), layers(down_proj, 0, down_proj.num_out), gate_of(mlp.config)
    )


def gate_of(config: MLPConfig) -> Gate:
    clamp = config.clamp
    if clamp is None:
        return Gate(config.activation)
    return Gate(config.activation, clamp.limit, clamp.after_activation, clamp.slope, clamp.up_offset)


def native_experts(experts: Experts, layers: Layers) -> native.Experts:
    """Raises ConfigError for sizes that are not whole panels: the experts of a layer lie one after the other."""
    config = experts.config
    sizes = {"expert width": (2 * config.expert.width, 2), "hidden size": (experts.down_columns(0).stop, 1)}
    for name, (rows, per_unit) in sizes.items():
        if rows % PANEL:
            raise ConfigError(
                f"{name} {rows // per_unit}: the native path takes experts in multiples of {PANEL // per_unit}; use "
                "attention_backend='torch'"
            )
    router, numbers = experts.router, range(config.num_experts)
    # Packed anew: the router's weights are few, and stay floats whatever form the others have.
    logits = LinearLayer([pack_weight(router.weight.values)], bias=None if router.bias is None else router.bias.values)
    return native.Experts(
        logits,
        routing_rule(
            config.router,
            config.num_experts,
            correction=None if router.correction is None else router.correction.values,
            expert_scale=None if router.expert_scale is None else router.expert_scale.values,
        ),
        [_columns(layers, experts.gate_up_proj, experts.gate_up_columns(each)) for each in numbers],
        [_columns(layers, experts.down_proj, experts.down_columns(each)) for each in numbers],
        gate_of(config.expert),
        scales_input=config.router.scales_input,
        shared=None if experts.shared is None else gated_mlp(experts.shared, layers),
        shared_gate=None if experts.shared_gate is None else layers(experts.shared_gate, 0, 1),
    )


def _columns(layers: Layers, projection: Projection, columns: slice) -> LinearLayer:
    return layers(projection, columns.start, columns.stop)


def routing_rule(
    config: RouterConfig,
    num_experts: int,
    *,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> RoutingRule:
    return RoutingRule(
        config.scoring,
        num_experts,
        config.top_k,
        config.num_groups,
        config.num_chosen_groups,
        correction,
        expert_scale,
        config.logit_cap or 0.0,
        config.is_renormalised,
        config.renormalised_floor,
        config.scale,
        config.jitter,
    )
