"""EngineConfig brings each argument to its own type, and refuses by name what it cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lamella import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens=8 is below max_num_seqs=9"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"attention_backend": "flash"}, "attention_backend='flash'"),
        ({"kv_cache_memory_fraction": 0}, "kv_cache_memory_fraction=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": "long"}, "max_model_len='long'"),
        ({"swa_eviction_interval": 0}, "swa_eviction_interval=0"),
        ({"seed": -1}, "seed=-1"),
        ({"model": ""}, "model=''"),
    ],
)
def test_bad_engine_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"model": "m", **arguments})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"model": Path("some") / "folder"}, {"model": "some/folder"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"device": torch.device("cuda", 1)}, {"device": "cuda:1"}),
        ({"seed": None}, {"seed": 0}),
        ({"max_model_len": -1}, {"max_model_len": -1}),
        ({"kv_cache_memory_fraction": 1}, {"kv_cache_memory_fraction": 1.0}),
        ({"block_size": 32}, {"page_size": 32}),
    ],
    ids=str,
)
def test_arguments_are_kept_in_their_own_type(given, kept):
    config = EngineConfig(**{"model": "m", **given})
    for name, value in kept.items():
        found = getattr(config, name)
        assert (found, type(found)) == (value, type(value))


def test_a_ratio_needs_a_split_by_ratio():
    with pytest.raises(ConfigError, match=r'swa_full_tokens_ratio=0.5 is given.*kv_split="elastic"'):
        EngineConfig(model="m", swa_full_tokens_ratio=0.5)


def test_a_config_does_not_change_and_a_changed_copy_is_checked_again():
    config = EngineConfig(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(ConfigError, match="page_size=0"):
        dataclasses.replace(config, page_size=0)
    assert dataclasses.replace(config, page_size=8) == EngineConfig(model="m", page_size=8)
