"""Qwen2 and Qwen3 with experts: which layers have them, which slide, and under which names numbers come."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, kinds, parsed, windows
from tests.helpers.parsed_experts import dense_widths, experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_sliding_window": True, "max_window_layers": 6, "num_hidden_layers": 8},
        {"mlp_only_layers": [0, 3], "num_hidden_layers": 4},
        {"decoder_sparse_step": 2, "norm_topk_prob": True},
        {"qkv_bias": False},
    ],
    ids=str,
)
def test_defaults_of_qwen2(fields):
    ours, theirs = check_defaults("Qwen2Moe", **fields)
    assert sizes_of(ours) == (theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    experts = experts_of(ours)
    assert experts.router.is_renormalised == theirs.norm_topk_prob
    assert experts.shared is not None
    assert (experts.shared.width, experts.shared_has_gate) == (theirs.shared_expert_intermediate_size, True)
    assert ours.layers[0].attention.has_qkv_bias == theirs.qkv_bias
    dense = [layer for layer in range(theirs.num_hidden_layers) if layer not in sparse_layers(ours)]
    step = theirs.decoder_sparse_step
    assert dense == [
        layer for layer in range(theirs.num_hidden_layers) if layer in theirs.mlp_only_layers or (layer + 1) % step
    ]
    assert dense_widths(ours) <= {theirs.intermediate_size}


def test_qwen2_slides_at_even_layers_below_a_bound():
    ours = parsed("Qwen2Moe", use_sliding_window=True, max_window_layers=5, num_hidden_layers=8, sliding_window=7)
    assert windows(ours) == [7, None, 7, None, 7, None, None, None]


@pytest.mark.parametrize(
    "fields", [{}, {"norm_topk_prob": True}, {"attention_bias": True}, {"mlp_only_layers": [1]}], ids=str
)
def test_defaults_of_qwen3(fields):
    ours, theirs = check_defaults("Qwen3Moe", **fields)
    assert sizes_of(ours) == (theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    assert experts_of(ours).shared is None
    assert ours.layers[0].attention.qk_norm == "heads"


def test_qwen3_slides_everywhere_and_saves_another_name():
    ours = parsed("Qwen3Moe", use_sliding_window=True, sliding_window=9, num_hidden_layers=3, num_local_experts=16)
    assert windows(ours) == [9, 9, 9]
    assert sizes_of(ours)[0] == 16


def test_what_is_refused():
    sliding = ["sliding_attention"] * 24
    check_refused("Qwen2Moe", "use_sliding_window is off", layer_types=sliding)
    check_refused("Qwen3Moe", "mlp_only_layers", mlp_only_layers=[24])
    assert kinds(parsed("Qwen2Moe", num_hidden_layers=1)) == ["full_attention"]
