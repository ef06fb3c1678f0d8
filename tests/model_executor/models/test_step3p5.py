"""Step-3.5 and 3.7: names of old files and of saved ones, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.mlp_config import ExpertsConfig
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields
from tests.helpers.parsed_configs import kinds, windows
from tests.helpers.parsed_experts import experts_of, sizes_of, sparse_layers

SLIDING, FULL = "sliding_attention", "full_attention"


def parsed(**fields: Any) -> ModelConfig:
    whole = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": fields}
    return parse_config(TypedFields(whole, "config.json"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_layers_enum": "1, 2", "num_hidden_layers": 4},
        {"mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2},
        # As saved with more than ten layers: their numbers have two digits.
        {
            "layer_types": [FULL, SLIDING] * 6,
            "num_hidden_layers": 12,
            "sliding_window": 8,
            "per_layer_config": {f"{layer:02}": {"num_attention_heads": 96} for layer in range(1, 12, 2)},
        },
        {
            "layer_types": [FULL, SLIDING] * 2,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "num_sliding_attention_heads": 96,
        },
        {
            "layer_types": [FULL, SLIDING] * 2,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 2},
        },
        {
            "layer_types": [FULL, SLIDING, FULL],
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 1,
            "sliding_window": 8,
            "rope_theta": [5e6, 1e4, 1.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0],
            "swiglu_limits": [0.0, 7.0, 0.0],
            "moe_layers_enum": [0, 1],
        },
    ],
    ids=str,
)
def test_defaults(fields):
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

    ours, theirs = parsed(**fields), Step3p7TextConfig(**fields)
    assert (ours.num_layers, ours.norm_eps) == (theirs.num_hidden_layers, theirs.rms_norm_eps)
    assert kinds(ours) == theirs.layer_types
    assert set(windows(ours)) - {None} <= {theirs.sliding_window}
    assert sparse_layers(ours) == [layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"]
    assert sizes_of(ours) == (theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    shared = experts_of(ours).shared
    assert shared is not None
    assert shared.width == theirs.share_expert_dim
    for index, layer in enumerate(ours.layers):
        attention, parameters = layer.attention, theirs.rope_parameters[layer.attention.kind]
        assert attention.num_heads == theirs.per_layer_config[index].num_attention_heads
        assert attention.scale == theirs.query_pre_attn_scalar**-0.5
        assert attention.rotary is not None
        part = parameters.get("partial_rotary_factor", 1.0)
        assert (attention.rotary.theta, attention.rotary.dim) == (parameters["rope_theta"], int(128 * part))
        limit = (theirs.swiglu_limits or [0.0] * ours.num_layers)[index]
        if isinstance(layer.mlp, ExpertsConfig):
            assert (layer.mlp.expert.clamp.limit if layer.mlp.expert.clamp else 0.0) == limit
    assert ours.num_left_out_layers == theirs.num_nextn_predict_layers


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"gating": "per-element"}, "gates of whole heads only"),
        ({"layer_types": [SLIDING] * 45}, "sliding_window"),
        ({"swiglu_limits": [1.0]}, "swiglu_limits"),
        ({"moe_layers_enum": "one"}, "moe_layers_enum"),
        ({"per_layer_config": {"0": {"head_dim": 3}}}, "head_dim=3: it is not built layer by layer"),
        ({"rope_theta": [1.0]}, "a list of 45 numbers"),
    ],
    ids=str,
)
def test_what_is_refused(fields, told):
    with pytest.raises(ModelLoadError, match=told):
        parsed(**fields)
