"""MiMo-V2-Flash: what differs between its two kinds of layers, and a window that counts without the query."""

from __future__ import annotations

import pytest

from lamella.model_executor.layers.rotary import rotary_frequencies
from tests.helpers.parsed_configs import check_refused, kinds, parsed, windows
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 64},
        {"sliding_window_size": 64},
        {"attention_value_scale": None, "routed_scaling_factor": None},
        {"n_group": 8, "topk_group": 4, "norm_topk_prob": False},
        {"mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2},
        {"attention_bias": True, "n_routed_experts": 32},
        # transformers does not read the names of the original files either
        {"hybrid_layer_pattern": [0] * 48, "swa_rope_theta": 5.0, "partial_rotary_factor": 1.0},
    ],
    ids=str,
)
def test_defaults(fields):
    from transformers import MiMoV2FlashConfig

    ours, theirs = parsed("MiMoV2Flash", **fields), MiMoV2FlashConfig(**fields)
    assert kinds(ours) == theirs.layer_types
    for layer in ours.layers:
        attention, slides = layer.attention, layer.attention.kind == "sliding_attention"
        assert (attention.k_dim, attention.v_dim) == (theirs.head_dim, theirs.v_head_dim)
        assert attention.num_kv_heads == theirs.num_key_value_heads * (2 if slides else 1)
        assert attention.has_sinks == slides
        assert attention.value_scale == (theirs.attention_value_scale or 1.0)
        assert attention.has_qkv_bias == theirs.attention_bias
        assert not attention.has_output_bias
        parameters = theirs.rope_parameters[attention.kind]
        assert attention.rotary is not None
        assert attention.rotary.theta == parameters["rope_theta"]
        assert attention.rotary.dim == int(theirs.head_dim * parameters["partial_rotary_factor"]) == 64
    assert set(windows(ours)) - {None} <= {theirs.sliding_window}
    assert sizes_of(ours) == (theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    assert sparse_layers(ours) == [layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    router = experts_of(ours).router
    assert (router.num_groups, router.num_chosen_groups) == (theirs.n_group, theirs.topk_group)
    assert (router.scale, router.is_renormalised) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)


def test_what_is_refused():
    check_refused("MiMoV2Flash", "n_group=3: 256 experts cannot be divided", n_group=3)
    check_refused("MiMoV2Flash", "topk_group=2", topk_group=2)
    check_refused("MiMoV2Flash", "mlp_layer_types", mlp_layer_types=["sparse"])
    check_refused("MiMoV2Flash", "full_attention", rope_parameters={"rope_type": "default"})


def test_an_odd_part_of_a_head_turns_one_more_element():
    import torch
    from transformers import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashRotaryEmbedding

    theirs = MiMoV2FlashConfig(head_dim=40)  # a third of it are 13 elements
    first, second = parsed("MiMoV2Flash", head_dim=40).layers[:2]
    for layer, kind in ((first, "full_attention"), (second, "sliding_attention")):
        wanted, _ = MiMoV2FlashRotaryEmbedding.compute_default_rope_parameters(theirs, layer_type=kind)
        rotary = layer.attention.rotary
        assert rotary is not None
        assert rotary.dim == 2 * len(wanted) == 14
        torch.testing.assert_close(rotary_frequencies(rotary, torch.device("cpu")), wanted, rtol=1e-6, atol=0)
