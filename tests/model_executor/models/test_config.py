"""A model as data: what follows from a layer's own fields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.models.config import AttentionConfig, ModelConfig, kv_sharing, layer_specs
from tests.helpers.published_configs import parsed

ATTENTION = AttentionConfig(
    kind="full_attention", num_heads=6, num_kv_heads=2, k_dim=24, v_dim=16, scale=0.5, rotary=None
)


def model_of(*attentions: AttentionConfig) -> ModelConfig:
    config = parsed("Llama", num_hidden_layers=1)
    return replace(config, layers=tuple(replace(config.layers[0], attention=each) for each in attentions))


def test_columns_of_q_k_and_v_are_heads_times_their_own_width():
    assert (ATTENTION.query_columns, ATTENTION.key_columns, ATTENTION.value_columns) == (144, 48, 32)


@pytest.mark.parametrize(
    ("kind", "window_tokens", "spec_class", "first_visible_to_10"),
    [
        ("full_attention", None, FullAttentionSpec, 0),
        ("sliding_attention", 4, SlidingWindowSpec, 7),
        ("chunked_attention", 4, ChunkedLocalAttentionSpec, 8),
    ],
)
def test_a_layers_kind_says_what_it_sees(kind, window_tokens, spec_class, first_visible_to_10):
    """Of keys 0 to 10, query 10 sees the last four where four are in its window, and 8 to 10 where chunks have four."""
    spec = replace(ATTENTION, kind=kind, window_tokens=window_tokens).spec(2)
    assert type(spec) is spec_class
    assert spec.first_visible(10) == first_visible_to_10
    assert spec.token_bytes == 2 * (24 + 16) * 2


def test_specs_and_owners_come_layer_by_layer():
    sliding = replace(ATTENTION, kind="sliding_attention", window_tokens=4)
    config = model_of(sliding, ATTENTION, replace(sliding, kv_owner=0), replace(ATTENTION, kv_owner=1))
    assert layer_specs(config, itemsize_bytes=4) == [each.spec(4) for each in (sliding, ATTENTION, sliding, ATTENTION)]
    assert kv_sharing(config) == {2: 0, 3: 1}
    assert config.num_layers == 4
