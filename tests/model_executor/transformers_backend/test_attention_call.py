"""What an attention call may say: an allow-list, so that nothing is passed over."""

import pytest
import torch

from lamella.model_executor.models.transformers_backend.attention_call import UnsupportedCallError, read_call


def call(module=None, *, query=(1, 4, 2, 16), key=(1, 2, 2, 16), value=(1, 2, 2, 8), **keywords):
    tensors = (torch.zeros(shape) for shape in (query, key, value))
    return read_call(module or torch.nn.Module(), *tensors, {"scaling": 0.25, **keywords})


def test_a_call_says_scale_cap_window_and_sinks():
    sinks = torch.arange(4.0)
    settings = call(sliding_window=8, softcap=50.0, s_aux=sinks, dropout=0.0, position_ids=torch.zeros(1, 2))
    assert (settings.scale, settings.softcap, settings.window_tokens) == (0.25, 50.0, 8)
    assert settings.sinks is sinks


def test_what_is_left_out_has_the_interfaces_defaults():
    settings = call(scaling=None, softcap=None, sliding_window=None, use_cache=False, output_router_logits=True)
    assert (settings.scale, settings.softcap, settings.window_tokens, settings.sinks) == (16**-0.5, None, None, None)


@pytest.mark.parametrize("name", ["position_bias", "alibi", "indices", "block_indices", "sinks", "cache_position"])
def test_an_unknown_keyword_is_refused_by_its_name(name):
    with pytest.raises(UnsupportedCallError, match=name):
        call(**{name: torch.zeros(1)})
    call(**{name: None})  # asks for nothing


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "not causal"),
        ({"scaling": torch.ones(())}, "scaling"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": True}, "sliding_window=True"),
        ({"s_aux": torch.zeros(3)}, "s_aux"),
        ({"key": (1, 2, 3, 16), "value": (1, 2, 3, 8)}, "3 keys for 2 tokens"),
        ({"key": (1, 3, 2, 16), "value": (1, 3, 2, 8)}, "a key of"),
        ({"value": (1, 4, 2, 8)}, "tensors of shapes"),
        ({"query": (2, 4, 2, 16)}, "tensors of shapes"),
    ],
    ids=str,
)
def test_a_value_that_is_not_built_is_refused(keywords, message):
    with pytest.raises(UnsupportedCallError, match=message):
        call(**keywords)


def test_a_module_that_is_not_causal_is_refused():
    module = torch.nn.Module()
    module.is_causal = False
    with pytest.raises(UnsupportedCallError, match="not causal"):
        call(module)


def test_only_a_layer_that_reads_anothers_kv_may_have_more_keys_than_tokens():
    tensors = (torch.zeros(shape) for shape in ((1, 4, 2, 16), (1, 2, 5, 16), (1, 2, 5, 8)))
    assert read_call(torch.nn.Module(), *tensors, {}, has_own_kv=False).scale == 0.25
