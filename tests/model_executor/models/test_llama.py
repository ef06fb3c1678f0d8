"""Llama: full attention in every layer, biases where the config or the file's tensors have them."""

from __future__ import annotations

import pytest

from lamella.errors import ModelLoadError
from tests.helpers.published_configs import biases, parsed, theirs


def test_every_layer_sees_everything() -> None:
    config = parsed("Llama", num_hidden_layers=3)
    assert {(layer.attention.kind, layer.attention.window_tokens) for layer in config.layers} == {
        ("full_attention", None)
    }
    assert len(config.layers) == 3
    assert (config.layers[0].mlp.activation, config.embedding_scale, config.final_logit_softcap) == ("silu", 1.0, None)


def test_layers_have_two_norms_before_their_parts_and_none_of_heads() -> None:
    (layer,) = set(parsed("Llama").layers)
    assert (layer.norms.input, layer.norms.mlp) == (True, True)
    assert not (layer.norms.post_attention)
    assert not (layer.norms.post_mlp)
    assert layer.attention.qk_norm is None


def test_which_layers_have_biases() -> None:
    assert biases(parsed("Llama")) == {(False, False, False)}
    assert biases(parsed("Llama", attention_bias=True)) == {(True, True, False)}
    assert biases(parsed("Llama", mlp_bias=True)) == {(False, False, True)}


def test_start_and_end_tokens_are_transformers_where_the_file_says_nothing() -> None:
    config, expected = parsed("Llama"), theirs("Llama")
    assert (config.bos_token_id, config.eos_token_ids) == (expected.bos_token_id, (expected.eos_token_id,))
    assert parsed("Llama", bos_token_id=None, eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert parsed("Llama", bos_token_id=None).bos_token_id is None


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_a_bias_that_is_no_truth_value_is_refused(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: {key}=1: must be true or false"):
        parsed("Llama", **{key: 1})
