"""Which experts each token takes, and with what weights: the readable form, in float32. The native kernels have the
same in csrc/routing.h."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lamella.model_executor.models.mlp_config import RouterConfig

_GROUP_VOTES = 2  # a group of experts counts by the sum of so many of its best


class Routing(NamedTuple):
    """expert_ids: int64 [T, top_k]; weights: float32 [T, top_k]. A token's experts come best first."""

    expert_ids: torch.Tensor
    weights: torch.Tensor


def route(
    logits: torch.Tensor,
    config: RouterConfig,
    *,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> Routing:
    """logits: [T, num_experts], bias included; correction and expert_scale: float32 [num_experts], where the config has
    them. See RouterConfig."""
    logits = logits.float()
    if config.logit_cap is not None:
        logits = torch.tanh(logits / config.logit_cap) * config.logit_cap
    if config.scoring == "sparse_mixer":
        return _sparse_mixer(logits, config)
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
    if correction is None and config.num_groups == 1:
        choice = logits  # the same order, and no ties where scores come near 0 or 1
    else:
        choice = _of_chosen_groups(scores if correction is None else scores + correction, config)
    expert_ids = choice.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if config.is_renormalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + config.renormalised_floor)
    weights = weights * config.scale
    return Routing(expert_ids, weights if expert_scale is None else weights * expert_scale[expert_ids])


def _of_chosen_groups(choice: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """-inf for experts of groups that are not chosen."""
    if config.num_groups == 1:
        return choice
    groups = choice.unflatten(1, (config.num_groups, -1))  # [T, groups, experts of a group]
    votes = groups.topk(_GROUP_VOTES, dim=-1).values.sum(dim=-1)
    is_left_out = torch.ones_like(votes, dtype=torch.bool)
    is_left_out.scatter_(1, votes.topk(config.num_chosen_groups, dim=-1).indices, False)
    return groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)


def _sparse_mixer(logits: torch.Tensor, config: RouterConfig) -> Routing:
    """Pick after pick: the best expert of those that are left, weighted by a softmax over those whose logit is near it.
    How near is relative to the larger of the best logit and the other's magnitude."""
    left, expert_ids, weights = logits, [], []
    for _ in range(config.top_k):
        best, expert_id = left.max(dim=-1, keepdim=True)
        # Of those picked before the logit is -inf here, but its magnitude counts.
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * config.jitter
        near = left.masked_fill(is_far, float("-inf"))
        weights.append(near.softmax(dim=-1).gather(1, expert_id))
        expert_ids.append(expert_id)
        left = left.scatter(1, expert_id, float("-inf"))
    return Routing(torch.cat(expert_ids, dim=1), torch.cat(weights, dim=1))
