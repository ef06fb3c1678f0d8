"""The feed-forward part of a described layer, as the native kernels take it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamella.errors import ConfigError
from lamella.model_executor.layers.description import DenseMLP, Experts, Projection
from lamella.model_executor.models.mlp_config import GateClamp, RouterConfig
from lamella.native import experts as native
from lamella.native.experts import RoutingRule
from lamella.native.layer_linear import LinearLayer
from lamella.native.library import PANEL
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate, GatedMLP

# Projection, first output, last output + 1 -> the layer of these outputs.
Layers = Callable[[Projection, int, int], LinearLayer]


def gated_mlp(mlp: DenseMLP, layers: Layers) -> GatedMLP:
    gate_up_proj, down_proj = mlp.gate_up_proj, mlp.down_proj
    return GatedMLP(
        layers(gate_up_proj, 0, gate_up_proj.num_out),
        layers(down_proj, 0, down_proj.num_out),
        gate_of(mlp.config.activation, mlp.config.clamp),
    )


def gate_of(activation: str, clamp: GateClamp | None) -> Gate:
    if clamp is None:
        return Gate(activation)
    return Gate(activation, clamp.limit, clamp.after_activation, clamp.slope, clamp.up_offset)


def native_experts(experts: Experts, layers: Layers) -> native.Experts:
    """Raises ConfigError for sizes that are not whole panels: the experts of a layer lie one after the other."""
    config, hidden = experts.config, experts.down_proj.num_out // experts.config.num_experts
    for name, size in (("expert width", 2 * config.width), ("hidden size", hidden)):
        if size % PANEL:
            raise ConfigError(
                f"{name} {size // 2 if name == 'expert width' else size} is not made of whole panels on the native "
                f"path, which takes multiples of {PANEL // 2 if name == 'expert width' else PANEL}; use "
                "attention_backend='torch'"
            )
    router, numbers = experts.router, range(config.num_experts)
    # Packed anew: the router's weights are few, and stay floats whatever form the others have.
    logits = LinearLayer(
        [pack_weight(router.weight.values.float())], bias=None if router.bias is None else router.bias.values
    )
    return native.Experts(
        logits,
        routing_rule(
            config.router,
            config.num_experts,
            correction=None if router.correction is None else router.correction.values,
            expert_scale=None if router.expert_scale is None else router.expert_scale.values,
        ),
        [layers(experts.gate_up_proj, each * 2 * config.width, (each + 1) * 2 * config.width) for each in numbers],
        [layers(experts.down_proj, each * hidden, (each + 1) * hidden) for each in numbers],
        gate_of(config.activation, config.clamp),
        scales_input=config.router.scales_input,
        shared=None if experts.shared is None else gated_mlp(experts.shared, layers),
        shared_gate=None if experts.shared_gate is None else layers(experts.shared_gate, 0, 1),
    )


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
