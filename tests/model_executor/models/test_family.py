"""What the parts of a config must be to each other, whatever family they are of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig, RotaryConfig
from lamella.model_executor.models.family import checked
from tests.helpers.published_configs import parsed

CONFIG = parsed(
    "Llama", vocab_size=10, num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_hidden_layers=2,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def with_attention(**changes) -> ModelConfig:
    """The last layer's attention is another one."""
    layer = replace(CONFIG.layers[1], attention=replace(CONFIG.layers[1].attention, **changes))
    return replace(CONFIG, layers=(CONFIG.layers[0], layer))


def test_what_fits_comes_back_as_it_is():
    for config in (
        CONFIG,
        with_attention(rotary=None),
        with_attention(num_kv_heads=6),
        replace(CONFIG, bos_token_id=9, eos_token_ids=(0, 9)),
    ):
        assert checked(config, "m/config.json") is config


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (with_attention(num_kv_heads=4), "6 attention heads cannot share 4 key-value heads evenly"),
        (with_attention(rotary=RotaryConfig(7, 1e4)), "head_dim=7: rotary embeddings turn pairs"),
        (replace(CONFIG, bos_token_id=10), "bos_token_id=10, but the vocabulary has 10 tokens"),
        (replace(CONFIG, eos_token_ids=(3, 11)), "eos_token_id=11, but the vocabulary has 10 tokens"),
    ],
    ids=["heads", "rotary", "bos", "eos"],
)
def test_what_does_not_fit_is_refused_by_its_file(config, told):
    with pytest.raises(ModelLoadError, match=f"m/config.json: {told}"):
        checked(config, "m/config.json")
