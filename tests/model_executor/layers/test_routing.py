"""Which experts a token takes: transformers' own routers, the readable form and the native kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamella.model_executor.layers.native_mlp import routing_rule
from lamella.model_executor.layers.routing import route
from lamella.model_executor.models.mlp_config import RouterConfig
from lamella.native.experts import RoutingRule
from lamella.native.experts import route as native_route

HIDDEN, EXPERTS, TOKENS = 24, 16, 200


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def oracle(family: str, class_name: str, **settings: Any) -> torch.nn.Module:
    """A router of transformers with random weights."""
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = {
        "hidden_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-6, **settings,
    }  # fmt: skip
    router = getattr(module, class_name)(SimpleNamespace(**config)).eval()
    with torch.no_grad():
        for index, tensor in enumerate([*router.parameters(), *router.buffers()]):
            tensor.copy_(random(*tensor.shape, seed=index) / 2)
    return router


# What transformers has -> (its class, its settings, ours).
CASES: dict[str, tuple[str, str, dict[str, Any], RouterConfig]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, RouterConfig(scoring="softmax", top_k=3, is_renormalised=True)),
    "qwen2": ("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, RouterConfig(scoring="softmax", top_k=3)),
    "softmax of the chosen": (
        "gpt_oss", "GptOssTopKRouter", {},
        RouterConfig(scoring="softmax", top_k=3, has_bias=True, is_renormalised=True),
    ),
    "groups": (
        "mimo_v2_flash", "MiMoV2FlashTopkRouter",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        RouterConfig(
            scoring="sigmoid", top_k=3, has_correction=True, num_groups=4, num_chosen_groups=2, is_renormalised=True,
            renormalised_floor=1e-20, scale=2.5,
        ),
    ),
    "capped logits": (
        "laguna", "LagunaTopKRouter", {"moe_router_logit_softcapping": 1.5},
        RouterConfig(scoring="sigmoid", top_k=3, has_correction=True, is_renormalised=True, logit_cap=1.5),
    ),
    "scale of each expert": (
        "gemma4", "Gemma4TextRouter", {"top_k_experts": 3},
        RouterConfig(scoring="softmax", top_k=3, is_renormalised=True, has_expert_scale=True),
    ),
    "sparse mixer": (
        "phimoe", "PhimoeTopKRouter",
        {"num_experts_per_tok": 2, "router_jitter_noise": 0.4, "input_jitter_noise": 0.0},
        RouterConfig(scoring="sparse_mixer", top_k=2, jitter=0.4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_routers_are_those_of_transformers(name):
    family, class_name, settings, config = CASES[name]
    router = oracle(family, class_name, **settings)
    correction = getattr(router, "e_score_correction_bias", None)
    expert_scale = getattr(router, "per_expert_scale", None)
    assert (correction is not None, expert_scale is not None) == (config.has_correction, config.has_expert_scale)
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(random(TOKENS, HIDDEN, seed=9))
        if family == "gemma4":  # the first result is probabilities
            logits = logits.log()
        elif family == "laguna":  # they are capped already
            logits = torch.atanh(logits / 1.5) * 1.5
        found = route(logits, config, correction=correction, expert_scale=expert_scale)
    expected_ids, order = expected_ids.sort(dim=1)
    ids, our_order = found.expert_ids.sort(dim=1)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(found.weights.gather(1, our_order), expected_weights.gather(1, order))
    # The kernel computes the same, and for one token as for all.
    rule = routing_rule(config, EXPERTS, correction=correction, expert_scale=expert_scale)
    native_ids, native_weights = native_route(logits, rule)
    assert torch.equal(native_ids, found.expert_ids)
    torch.testing.assert_close(native_weights, found.weights, atol=2e-6, rtol=2e-5)
    for token in range(0, TOKENS, 17):
        alone_ids, alone_weights = native_route(logits[token : token + 1], rule)
        assert torch.equal(alone_ids[0], native_ids[token])
        assert torch.equal(alone_weights[0], native_weights[token])


def test_sigmoid_of_chosen_logits():
    """Llama 4's: far out, where sigmoids are all 1, the largest logits still count."""
    logits = torch.tensor([[30.0, 10.0, 31.0, -3.0], [0.0, 2.0, 1.0, -40.0]])
    config = RouterConfig(scoring="sigmoid", top_k=2)
    expected = [[2, 0], [1, 2]]
    assert route(logits, config).expert_ids.tolist() == expected
    ids, weights = native_route(logits, RoutingRule("sigmoid", 4, 2))
    assert ids.tolist() == expected
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids))


def test_a_router_needs_its_vectors():
    with pytest.raises(Exception, match=r"top_k=3 must be from 1 to 2"):
        native_route(torch.zeros(1, 4), RoutingRule("sigmoid", 4, 3, num_groups=2))
    with pytest.raises(Exception, match=r"num_groups=3 does not divide num_experts=4"):
        native_route(torch.zeros(1, 4), RoutingRule("sigmoid", 4, 3, num_groups=3))
    with pytest.raises(Exception, match=r"scoring='argmax' is not known"):
        native_route(torch.zeros(1, 4), RoutingRule("argmax", 4, 1))
