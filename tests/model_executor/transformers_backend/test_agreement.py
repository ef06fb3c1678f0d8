"""The config and the attention calls are compared at load; where they differ, the model is not run."""

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.models.transformers_backend.agreement import agreed_specs
from lamella.model_executor.models.transformers_backend.declared_layers import declared_layers
from lamella.model_executor.models.transformers_backend.recorder import record_layers
from tests.helpers.transformers_models import WINDOW, random_config, recorded_model


def specs_of(model, config, device="cpu"):
    recorded = record_layers(model, torch.device(device))
    return agreed_specs(config, declared_layers(config), recorded, itemsize_bytes=4)


def attention_of(model, layer):
    return model.model.layers[layer].self_attn


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_specs_are_what_config_and_calls_say(device):
    specs, owners = specs_of(*recorded_model("mimo_v2_flash", device), device)
    sliding = SlidingWindowSpec(window_tokens=WINDOW, num_kv_heads=4, k_dim=16, v_dim=8, itemsize_bytes=4)
    full = FullAttentionSpec(num_kv_heads=2, k_dim=16, v_dim=8, itemsize_bytes=4)
    assert specs == [full if layer in (0, 5, 11) else sliding for layer in range(12)]
    assert owners == {}


def test_chunks_are_windows():
    specs, _ = specs_of(*recorded_model("llama4_text"))
    assert [isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs] == [True, True, True, False] * 2
    assert specs[0].reach_tokens == WINDOW


def test_layers_that_share_kv_are_found_by_what_they_are_given():
    _, owners = specs_of(*recorded_model("gemma3n_text"))
    assert owners == {6: 5, 7: 5, 8: 5, 9: 4}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("model_type", "layer", "attribute", "value", "message"),
    [
        ("gemma2", 0, "sliding_window", WINDOW + 1, "the window of a layer"),
        ("gemma2", 1, "sliding_window", WINDOW, "the window of a layer"),
        ("gemma2", 1, "attn_logit_softcapping", 30.0, "soft-cap"),
        ("gemma2", 1, "attn_logit_softcapping", None, "soft-cap"),
        ("gemma2", 0, "scaling", 0.5, "the scale"),
        ("granite", 0, "scaling", 0.25, "the scale"),
        ("gpt_oss", 1, "sinks", None, "sinks"),
    ],
)
def test_a_call_that_says_otherwise_is_an_error(model_type, layer, attribute, value, message, device):
    model, config = recorded_model(model_type, device)
    attention = attention_of(model, layer)
    if attribute == "sinks":  # the module has them, and the call leaves them out
        attention.register_parameter("other_sinks", attention.sinks)
        attention.sinks = None
    else:
        setattr(attention, attribute, value)
    with pytest.raises(ModelLoadError, match=rf"layer {layer} .*{message}"):
        specs_of(model, config, device)


@pytest.mark.parametrize(
    ("model_type", "field", "value", "message"),
    [
        ("phi3", "num_key_value_heads", 1, "KV heads"),
        ("phi3", "v_head_dim", 4, "the size of V"),
        ("gemma2", "sliding_window", WINDOW - 1, "the window"),
        ("gemma2", "layer_types", ["sliding_attention"] * 4, "which tokens it sees"),
        ("gemma2", "layer_types", ["full_attention"] * 4, "the window"),
        ("gemma2", "query_pre_attn_scalar", 64, "the scale"),
        ("gemma2", "attn_logit_softcapping", 30.0, "soft-cap"),
        ("gemma3n_text", "num_kv_shared_layers", 2, "which layers read another's KV"),
    ],
)
def test_a_config_that_says_otherwise_is_an_error(model_type, field, value, message):
    model, config = recorded_model(model_type)
    setattr(config, field, value)
    for layer in model.model.layers:  # where the code has a word of its own, it is left out
        layer.self_attn.num_key_value_groups = None
    with pytest.raises(ModelLoadError, match=message):
        specs_of(model, config)


def test_a_mask_of_another_shape_is_an_error():
    """No window in the call, so the mask alone says how far the layers see."""
    model, config = recorded_model("llama4_text")
    config.attention_chunk_size = WINDOW + 1
    with pytest.raises(ModelLoadError, match="which tokens it sees"):
        specs_of(model, config)


def test_layers_without_attention_are_an_error():
    model, config = recorded_model("llama")
    config.num_hidden_layers = 5
    config.layer_types = ["full_attention"] * 5
    with pytest.raises(ModelLoadError, match="5 layers, but 4 of its parts call attention"):
        specs_of(model, config)


@pytest.mark.parametrize("kind", ["linear_attention", "hybrid", "conv", "compressed_sparse_attention"])
def test_a_kind_of_layer_that_keeps_more_than_kv_is_refused_by_its_name(kind):
    config = random_config("gemma2")
    config.layer_types = [kind] * 4
    with pytest.raises(ModelLoadError, match=kind):
        declared_layers(config)


def test_a_window_is_converted_by_the_configs_own_class():
    config = random_config("mimo_v2_flash", sliding_window_size=20)
    assert {layer.window_tokens for layer in declared_layers(config)} == {21, None}
