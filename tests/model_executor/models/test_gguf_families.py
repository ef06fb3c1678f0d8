"""Families in GGUF files: what the format leaves to its reader, numbers of each layer, and refusals by key."""

from __future__ import annotations

from typing import Any

import gguf
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig, ProportionalScaling
from lamella.model_executor.models.mlp_config import ExpertsConfig
from lamella.model_executor.models.registry import parse_config, parse_gguf_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.weights.gguf_header import read_gguf_header
from tests.helpers.random_gguf import save_random_gguf
from tests.helpers.random_gguf_configs import config_of
from tests.helpers.random_models import random_model


@pytest.fixture(scope="module")
def model_of():
    """name -> transformers' model, made once."""
    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            made[name] = random_model(config_of(name, 0))
        return made[name]

    return model


def gguf_config(path, name: str, model: Any, changed: dict[str, Any] | None = None) -> ModelConfig:
    save_random_gguf(path, name, model, changed)
    return parse_gguf_config(read_gguf_header(path))


@pytest.mark.parametrize("name", ["llama4", "afmoe", "granitemoe"])
def test_files_say_what_config_json_says(name, model_of, tmp_path):
    """Llama 4's chunks of 8,192 and its scales by position included, which no short text shows."""
    model = model_of(name)
    stated = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    wanted = parse_config(TypedFields(stated, "config.json"))
    found = gguf_config(tmp_path / "m.gguf", name, model)
    assert len(found.layers) == len(wanted.layers)
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert ours.norms == theirs.norms
        assert ours.mlp == theirs.mlp or isinstance(ours.mlp, ExpertsConfig)
        for field in theirs.attention.__slots__:
            if field != "rotary":
                value = getattr(theirs.attention, field)
                same = getattr(ours.attention, field) == (pytest.approx(value) if field == "scale" else value)
                assert same, field
        assert (ours.attention.rotary is None) == (theirs.attention.rotary is None)


def test_llama_4_without_windows_turns_every_layer(model_of, tmp_path):
    config = gguf_config(tmp_path / "m.gguf", "llama4", model_of("llama4"), {"attention.sliding_window": 0})
    for layer in config.layers:
        assert (layer.attention.kind, layer.attention.query_scale) == ("full_attention", None)
        assert layer.attention.rotary is not None


def test_gemma_4_pairs_that_do_not_turn(model_of, tmp_path):
    layers = gguf_config(tmp_path / "m.gguf", "gemma4", model_of("gemma4")).layers
    rotaries = [each.attention.rotary for each in layers if each.attention.kind == "full_attention"]
    part = model_of("gemma4").config.rope_parameters["full_attention"]["partial_rotary_factor"]
    for rotary in rotaries:
        assert rotary is not None
        if part < 1:
            assert rotary.scaling == ProportionalScaling(int(rotary.dim * part // 2))


def test_layers_for_several_tokens_are_left_out(model_of, tmp_path):
    model = model_of("mimo_v2_flash")
    config = gguf_config(tmp_path / "m.gguf", "mimo_v2_flash", model)
    assert (config.num_layers, config.num_left_out_layers) == (model.config.num_hidden_layers, 1)


def test_the_value_scale_that_the_first_converter_left_out(model_of, tmp_path):
    """Without layers for several tokens a file without it is of that one, and the scale is the published model's."""
    model = model_of("mimo_v2_flash")
    slides = [kind == "sliding_attention" for kind in model.config.layer_types]
    old = {
        "block_count": len(slides),
        "nextn_predict_layers": None,
        "attention.value_scale": None,
        "attention.sliding_window_pattern": slides,
        "attention.head_count_kv": [model.config.num_key_value_heads * (1 + each) for each in slides],
    }
    assert gguf_config(tmp_path / "old.gguf", "mimo_v2_flash", model, old).layers[0].attention.value_scale == 0.707
    new = {"attention.value_scale": None}
    assert gguf_config(tmp_path / "new.gguf", "mimo_v2_flash", model, new).layers[0].attention.value_scale == 1.0


def test_phi_moe_has_the_published_factor_at_the_published_lengths(tmp_path):
    settings = config_of("phimoe", 0).to_dict()
    num_pairs = settings["hidden_size"] // settings["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.5] * num_pairs, "long_factor": [2.0] * num_pairs}
    rope |= {"short_mscale": 1.2, "long_mscale": 1.2}
    kind = type(config_of("phimoe", 0))
    model = random_model(kind(**{**settings, "rope_parameters": rope}))
    stated = {"context_length": 131072, "rope.scaling.original_context_length": 4096}
    worked_out = (1 + 5 / 12) ** 0.5  # ln 32 / ln 4096
    found = [
        gguf_config(tmp_path / f"{index}.gguf", "phimoe", model, {**stated, "rope.scaling.attn_factor": each, **more})
        for index, (each, more) in enumerate([(worked_out, {}), (1.3, {}), (worked_out, {"context_length": 8192})])
    ]
    magnitudes = [config.layers[0].attention.rotary.magnitude for config in found]
    assert magnitudes == pytest.approx([1.243163121016122, 1.3, worked_out], rel=1e-6)


def test_granite_without_an_embedding(model_of, tmp_path):
    for name in ("granite", "granitemoe"):
        config = gguf_config(tmp_path / f"{name}.gguf", name, model_of(name), {"rope.scaling.finetuned": False})
        assert all(layer.attention.rotary is None for layer in config.layers)


def test_phi_3_says_0_for_no_window(model_of, tmp_path):
    config = gguf_config(tmp_path / "m.gguf", "phi3", model_of("phi3"), {"attention.sliding_window": 0})
    assert {layer.attention.kind for layer in config.layers} == {"full_attention"}


REFUSED = [
    ("gemma4", "attention.shared_kv_layers", 6, "one of each kind must have K and V"),
    ("gemma4", "attention.head_count_kv", [1, 2], "it has 2 entries for 6 layers"),
    ("gemma4", "attention.value_length_swa", 8, "heads of one length"),
    ("gemma4", "attention.sliding_window", None, "sliding_window is missing"),
    ("llama4", "expert_gating_func", 1, "built with sigmoid"),
    ("llama4", "expert_gating_func", 7, "it is not built; known: 1"),
    ("llama4", "expert_weights_norm", True, "built for this architecture as False"),
    ("mimo_v2_flash", "expert_group_count", 3, "8 experts cannot be divided"),
    ("mimo_v2_flash", "expert_group_used_count", 9, "it can be that at most"),
    ("mimo_v2_flash", "nextn_predict_layers", 8, "there are 8 layers in all"),
    ("mimo_v2_flash", "attention.head_count_kv", [0] * 8, "from 1 to"),
    ("step3p5", "swiglu_clamp_exp", [0.5, -1.0, 0.0, 0.0, 0.0, 0.0], "numbers of at least 0"),
    ("step3p5", "swiglu_clamp_shexp", [0.5], "numbers of at least 0"),
    ("step3p5", "rope.dimension_count", 6, "a multiple of 4"),
    ("step3p5", "expert_weights_norm", False, "built for this architecture as True"),
    ("afmoe", "leading_dense_block_count", 5, "the first layer with a router is"),
    ("afmoe", "attention.sliding_window", None, "sliding_window is missing"),
    ("laguna", "attention.head_count", [1, 2, 3], "it has 3 entries for 8 layers"),
    ("laguna", "router_logit_softcapping", -1.0, "router_logit_softcapping"),
    ("phimoe", "expert_used_count", 3, "the sparse mixer picks 2"),
    ("granitemoe", "expert_used_count", 40, "it can be that at most"),
    ("qwen3", "attention.value_scale", 0.5, "it is not built for this architecture"),
]


@pytest.mark.parametrize(("name", "key", "value", "told"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_is_refused(name, key, value, told, model_of, tmp_path):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{key.split('.')[-1]}.*{told}|m\.gguf.*{told}"):
        gguf_config(tmp_path / "m.gguf", name, model_of(name), {key: value})


def test_gemma_3n_is_refused_with_the_reason(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3n")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"gemma3n.*AltUp"):
        parse_gguf_config(read_gguf_header(tmp_path / "m.gguf"))
