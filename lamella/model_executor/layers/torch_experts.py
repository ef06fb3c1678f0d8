"""Experts in eager PyTorch: the readable form, expert after expert."""

from __future__ import annotations

import torch

from lamella.model_executor.layers.description import Experts, Router
from lamella.model_executor.layers.routing import Routing, route
from lamella.model_executor.layers.textbook import Operations, project, run_dense


def run_experts(operations: Operations, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None) -> torch.Tensor:
    """As `Operations.experts`."""
    expert_ids, weights = route_tokens(experts.router, x if routed is None else routed)
    out = shared_output(operations, experts, x)
    for expert in expert_ids.unique().tolist():
        if expert not in experts.config.held_experts:
            continue  # another worker's
        tokens, picks = torch.where(expert_ids == expert)
        weight = weights[tokens, picks].unsqueeze(1).to(x.dtype)
        taken = x[tokens]
        if experts.config.router.scales_input:
            taken, weight = taken * weight, torch.ones_like(weight)
        columns, down_columns = experts.gate_up_columns(expert), experts.down_columns(expert)
        gate_up = project(operations, experts.gate_up_proj, taken, columns=columns)
        bias = experts.gate_up_proj.bias
        activated = operations.activate(gate_up, None if bias is None else bias[columns], experts.config.expert)
        given = project(operations, experts.down_proj, activated, columns=down_columns)
        if experts.down_proj.bias is not None:
            given = given + experts.down_proj.bias[down_columns]
        out.index_add_(0, tokens, given * weight)
    return out


def route_tokens(router: Router, x: torch.Tensor) -> Routing:
    """The experts of each row of x [T, width], in float32 whatever x is."""
    logits = torch.nn.functional.linear(x.float(), router.weight.values)
    if router.bias is not None:
        logits = logits + router.bias.values
    return route(
        logits,
        router.config,
        correction=None if router.correction is None else router.correction.values,
        expert_scale=None if router.expert_scale is None else router.expert_scale.values,
    )


def shared_output(operations: Operations, experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """What every token gets, whatever its experts: a new tensor [T, width]."""
    if experts.shared is None:
        return torch.zeros_like(x)
    out, bias = run_dense(operations, experts.shared, x), experts.shared.down_proj.bias
    out = out.contiguous() if bias is None else out + bias
    if experts.shared_gate is not None:
        out = out * torch.sigmoid(project(operations, experts.shared_gate, x))
    return out
