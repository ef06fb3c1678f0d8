"""StarCoder 2: LayerNorms with biases, biases everywhere unless switched off, an MLP without a gate."""

from __future__ import annotations

import pytest

from tests.helpers.parsed_configs import check_defaults, check_refused, parsed, windows


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9}, {"use_bias": False, "norm_epsilon": 1e-3}], ids=str)
def test_defaults(fields):
    # transformers' default tokens lie outside of its default vocabulary.
    ours, theirs = check_defaults("Starcoder2", vocab_size=60_000, **fields)
    assert (ours.norm_kind, ours.norm_has_bias) == ("layer", True)
    assert set(windows(ours)) == {theirs.sliding_window}
    for layer in ours.layers:
        assert not layer.mlp.is_gated
        assert layer.mlp.activation == "gelu_tanh"
        biases = {layer.attention.has_qkv_bias, layer.attention.has_output_bias, layer.mlp.has_bias}
        assert biases == {theirs.use_bias}


def test_default_tokens_outside_of_the_vocabulary_are_none():
    ours = parsed("Starcoder2")
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (49152, None, ())


def test_what_is_refused():
    check_refused("Starcoder2", "eos_token_id=50256, but the vocabulary has 49152", eos_token_id=50256)
    check_refused("Starcoder2", "hidden_act='mish'", hidden_act="mish")
