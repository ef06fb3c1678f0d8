"""Llama 4: chunks, layers without rotary embedding, and which layers have experts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.parsed_configs import check_refused, kinds, parsed, windows
from tests.helpers.parsed_experts import dense_widths, experts_of, sizes_of, sparse_layers


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"no_rope_layer_interval": 2, "num_hidden_layers": 4},
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3},
        {"no_rope_layers": [], "num_hidden_layers": 5},
        {"attention_chunk_size": None},
        {"interleave_moe_layer_step": 2},
        {"moe_layers": [1], "num_hidden_layers": 3},
        {"attn_temperature_tuning": False, "use_qk_norm": False},
    ],
    ids=str,
)
def test_defaults(fields: dict[str, Any]):
    from transformers import Llama4TextConfig

    ours, theirs = parsed("Llama4", **fields), Llama4TextConfig(**fields)
    attentions = [layer.attention for layer in ours.layers]
    assert kinds(ours) == theirs.layer_types
    chunk = theirs.attention_chunk_size
    assert windows(ours) == [chunk if kind == "chunked_attention" else None for kind in theirs.layer_types]
    assert [int(each.rotary is not None) for each in attentions] == theirs.no_rope_layers
    for each, rotated in zip(attentions, theirs.no_rope_layers, strict=True):
        assert (each.num_heads, each.num_kv_heads, each.k_dim) == (40, 8, theirs.head_dim)
        assert (each.qk_norm == "heads_weightless") == bool(rotated and theirs.use_qk_norm)
        assert (each.query_scale is not None) == bool(theirs.attn_temperature_tuning and not rotated)
    assert sparse_layers(ours) == theirs.moe_layers
    assert sizes_of(ours) == (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size)
    assert dense_widths(ours) <= {theirs.intermediate_size_mlp}
    assert experts_of(ours).router.scales_input


def test_the_text_part_of_a_checkpoint_with_images():
    from lamella.model_executor.models.registry import parse_config
    from lamella.model_executor.models.typed_fields import TypedFields

    fields = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"num_hidden_layers": 3}}
    assert parse_config(TypedFields(fields, "config.json")).num_layers == 3


def test_what_is_refused():
    check_refused("Llama4", "no_rope_layers", no_rope_layers=[1, 0])
    check_refused("Llama4", "attention_chunk_size", attention_chunk_size=None, layer_types=["chunked_attention"] * 48)
    check_refused("Llama4", "moe_layers", moe_layers=[48])


def test_a_factor_that_norms_take_out_again():
    """The norm comes behind the embedding: of m x it is that of x, with eps / m²."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    yarn |= {"attention_factor": 2.0}
    first, *_, full = parsed("Llama4", rope_parameters=yarn, num_hidden_layers=4, rms_norm_eps=1e-4).layers
    assert (first.attention.rotary.magnitude, first.attention.qk_norm_eps) == (1.0, 2.5e-5)
    assert full.attention.qk_norm_eps is None
    first = parsed("Llama4", rope_parameters=yarn, use_qk_norm=False).layers[0]
    assert (first.attention.rotary.magnitude, first.attention.qk_norm_eps) == (2.0, None)
