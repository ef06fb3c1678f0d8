"""Experts on a GPU: routing by torch, products in groups, nothing that waits for the device."""

from __future__ import annotations

import torch

from lamella.model_executor.layers.description import Experts
from lamella.model_executor.layers.textbook import Operations
from lamella.model_executor.layers.torch_experts import route_tokens, shared_output
from lamella.model_executor.layers.triton.grouped import combined, grouped_product, sorted_rows


def run_experts(operations: Operations, experts: Experts, x: torch.Tensor, routed: torch.Tensor | None) -> torch.Tensor:
    """As `Operations.experts`."""
    config = experts.config
    count, top_k = config.num_experts, config.router.top_k
    expert_ids, weights = route_tokens(experts.router, x if routed is None else routed)
    weights = weights.contiguous()
    pairs = sorted_rows(expert_ids, count)
    gate_up_proj, down_proj, scales_input = experts.gate_up_proj, experts.down_proj, config.router.scales_input
    gate_up = grouped_product(
        x, pairs, gate_up_proj.weight, count, pairs_per_row=top_k, bias=gate_up_proj.bias,
        factors=weights.flatten() if scales_input else None,
    )  # fmt: skip
    activated = operations.activate(gate_up, None, config.expert)
    given = grouped_product(activated, pairs, down_proj.weight, count, pairs_per_row=1, bias=down_proj.bias)
    shared = None if experts.shared is None else shared_output(operations, experts, x).contiguous()
    return combined(given, None if scales_input else weights, shared, top_k)
