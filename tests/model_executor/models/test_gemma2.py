"""Gemma 2 and VaultGemma: defaults are transformers', caps that are null are none."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.config import NormPlaces
from tests.helpers.parsed_configs import check_defaults, check_refused, parsed


@pytest.mark.parametrize("name", ["Gemma2", "VaultGemma"])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 77, "head_dim": 64}, {"num_hidden_layers": 5}], ids=str)
def test_defaults(name, fields):
    ours, theirs = check_defaults(name, **fields)
    assert ours.embedding_scale == ours.hidden_size**0.5
    assert ours.final_logit_softcap == theirs.final_logit_softcapping
    for layer in ours.layers:
        assert layer.attention.scale == theirs.query_pre_attn_scalar**-0.5
        assert layer.attention.softcap == theirs.attn_logit_softcapping
        assert layer.norms == (NormPlaces(True, True, True, True) if name == "Gemma2" else NormPlaces())


def test_caps_that_are_null_are_none():
    ours = parsed("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert ours.final_logit_softcap is None
    assert {layer.attention.softcap for layer in ours.layers} == {None}


def test_what_is_refused():
    check_refused("Gemma2", "encoder", use_bidirectional_attention=True)
    check_refused("Gemma2", "sliding_window=None", sliding_window=None)
    check_refused("VaultGemma", "hidden_activation='mish'", hidden_activation="mish")
