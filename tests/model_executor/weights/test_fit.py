"""A checkpoint is held against its configuration before a layer is built, and none of its tensors is passed over."""

from __future__ import annotations

import json
import logging
import shutil
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import LLM
from lamella.engine import model_opening
from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.loading import load_config, resolve_model
from tests.helpers.tiny_gemma import native_shapes, save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

SMALL = {"num_hidden_layers": 2, "sliding_window_pattern": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    return path, save_tiny_gemma(path, **SMALL)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_tensors(folder, **tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**31, "layer_types": None}, "num_hidden_layers=2147483648: must be an integer from 1"),
        ({"num_hidden_layers": 10_000, "layer_types": None}, r"layers\.2\..* is missing"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"layers\.2\..* is missing"),
        ({"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\..* has no place"),
        ({"vocab_size": 2**26}, r"embed_tokens\.weight has shape \[320, 64\], wanted \[67108864, 64\]"),
        ({"hidden_size": 2**24}, r"has shape .*, wanted .*16777216"),
        ({"intermediate_size": 2**24}, r"has shape .*, wanted .*16777216"),
        ({"num_attention_heads": 2**6, "num_key_value_heads": 2**6}, r"q_proj\.weight has shape"),
        ({"head_dim": 2**16}, r"q_proj\.weight has shape"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    ],
    ids=str,
)
def test_claims_that_the_file_does_not_hold_are_told_before_anything_is_built(folder, monkeypatch, changes, message):
    made = []
    for place, name in ((model_opening, "Model"), (model_opening, "Stack"), (loading, "collect")):
        monkeypatch.setattr(place, name, lambda *arguments: made.append(arguments))
    change_config(folder, **changes)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message):
            LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=2**22)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made == []
    assert peak_bytes < 100 << 20  # of Python's own objects: as many as 10,000 layers' names take


def test_gguf_claims_are_held_against_the_file_too(saved, tmp_path):
    path = tmp_path / "m.gguf"
    for layers, message in (
        (2**31, "block_count=2147483648: must be an integer from 1"),
        (9_999, r"layers\.2\..* is missing"),
        (1, r"blk\.1\..* has no place"),
    ):
        save_tiny_gguf(path, saved[1], gemma3__block_count=layers)
        with pytest.raises(ModelLoadError, match=message):
            load_config(resolve_model(str(path)))


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_told_without_a_model_are_the_models(tmp_path, tied):
    model = save_tiny_gemma(tmp_path, tie_word_embeddings=tied, num_key_value_heads=1)
    config = load_config(resolve_model(str(tmp_path)))
    wanted = native_shapes(model.config) | ({} if tied else {"lm_head.weight": (320, 64)})
    assert {each.name: each.shape for each in Model(config, torch.float32).parameters()} == wanted


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.2.self_attn.k_scale",
        "model.layers.0.self_attn.q_scale",
        "model.layers.0.self_attn.sinks",
        "model.embed_tokens_per_layer.weight",
        "lm_head.bias",
        "audio_tower.weight",
        "rotary_emb.scale",
    ],
)
def test_a_tensor_that_nothing_reads_is_an_error(folder, name):
    add_tensors(folder, **{name: torch.ones(1)})
    with pytest.raises(ModelLoadError, match=f"{name.removeprefix('model.')} has no place in the model"):
        load_config(resolve_model(str(folder)))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_sinks.weight", "w.blk.0.x"])
def test_a_gguf_tensor_that_nothing_reads_is_an_error(saved, tmp_path, name):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, saved[1])
    data = path.read_bytes()
    old = b"blk.1.attn_q_norm.weight"
    padded = name.encode() + b"." * (len(old) - len(name))  # the header keeps its length
    path.write_bytes(data.replace(old, padded))
    with pytest.raises(ModelLoadError, match="has no place in the model"):
        load_config(resolve_model(str(path)))


def test_what_a_text_model_does_without_is_told_once(folder, caplog):
    add_tensors(
        folder,
        **{
            "model.vision_tower.embeddings.weight": torch.ones(3),
            "vision_tower.vision_model.post_layernorm.weight": torch.ones(3),
            "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(3),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "model.rotary_emb_local.inv_freq": torch.ones(8),
        },
    )
    with caplog.at_level(logging.INFO, logger="lamella"):
        config = load_config(resolve_model(str(folder)))
    assert config.num_layers == 2
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "the vision tower (2 tensors)" in told
    assert "the multimodal projector (1 tensors)" in told
    assert "rotary frequencies (2 tensors)" in told


@pytest.mark.parametrize("changes", [{"vocab_size": 2**26}, {"intermediate_size": 2**24}])
def test_random_weights_that_no_memory_holds_are_refused_before_they_are_made(folder, changes):
    change_config(folder, hidden_size=2**20, **changes)
    with pytest.raises(ModelLoadError, match=r"random weights of this shape take at least \d+\.\d GiB"):
        LLM(str(folder), load_format="dummy", max_model_len=64, kv_cache_memory_bytes=2**22)
