import dataclasses
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights import conversion as weight_conversion
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_shapes, native_weights, save_tiny_gemma


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, transformers model); tests copy the folder before they change it."""
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_gemma(path, seed=3)


@pytest.fixture
def folder(saved, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for file in saved[0].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def model(saved):
    return saved[1]


def load(folder, model, *, dtype=torch.float32, cache_dir=None, load_format="auto"):
    source = resolve_model(str(folder), load_format)
    cache_dir = cache_dir or folder.parent / "cache"
    return load_weights(source, Model(load_config(source), dtype), cache_dir=cache_dir)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def rewrite(folder, change):
    """Load model.safetensors, let `change` alter the dict, save it."""
    tensors = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_equals_state_dict_fused_by_hand(folder, model):
    assert_same(load(folder, model), native_weights(model))


def test_pieces_smaller_than_a_parameter_make_the_same_weights(folder, model, monkeypatch):
    monkeypatch.setattr(weight_conversion, "_PIECE_ELEMENTS", 300)
    assert_same(load(folder, model), native_weights(model))


def test_shards(tmp_path):
    model = save_tiny_gemma(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_same(load(tmp_path / "sharded", model), native_weights(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compute_dtype_leaves_norms_in_float32(folder, model, dtype):
    wanted = {
        name: value if name.endswith("norm.weight") else value.to(dtype)
        for name, value in native_weights(model).items()
    }
    assert_same(load(folder, model, dtype=dtype), wanted)


def test_norm_multipliers_of_a_bfloat16_checkpoint_are_exact(tmp_path):
    model = save_tiny_gemma(tmp_path / "half", dtype="bfloat16")
    found = load(tmp_path / "half", model)
    assert load_config(resolve_model(str(tmp_path / "half"))).dtype == "bfloat16"
    weight = model.state_dict()["model.norm.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(found["norm.weight"], 1.0 + weight.float())
    assert torch.equal(found["embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_multimodal_names_and_vision_tensors(folder, model, prefix):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(3)
        tensors["model.vision_tower.embeddings.weight"] = torch.ones(3)
        tensors["model.multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)

    rewrite(folder, rename)
    assert_same(load(folder, model), native_weights(model))


def test_untied_output_matrix(tmp_path):
    model = save_tiny_gemma(tmp_path / "untied", tie_word_embeddings=False)
    source = resolve_model(str(tmp_path / "untied"))
    found = load_weights(source, Model(load_config(source), torch.float32), cache_dir=tmp_path / "cache")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        **native_shapes(model.config), "lm_head.weight": (320, 64)
    }  # fmt: skip
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)
    assert not torch.equal(found["lm_head.weight"], found["embed_tokens.weight"])


def test_all_problems_are_told_at_once(folder, model):
    def spoil(tensors):
        del tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(31, 64)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.int8)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    rewrite(folder, spoil)
    with pytest.raises(ModelLoadError) as error:
        load(folder, model)
    message = str(error.value)
    assert "layers.3.mlp.up_proj.weight is missing" in message
    assert "model.layers.1.self_attn.k_proj.weight has shape [31, 64], wanted [32, 64]" in message
    assert "model.layers.0.mlp.down_proj.weight: dtype I8 is not read" in message
    assert "model.layers.0.self_attn.q_proj.bias has no place in the model" in message


def test_many_problems_are_counted(folder, model):
    rewrite(folder, lambda tensors: [tensors.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(6)])
    with pytest.raises(ModelLoadError, match=r"layers\.4\.mlp\.up_proj\.weight is missing; and 1 more"):
        load(folder, model)


@pytest.mark.parametrize("kept_bytes", [0, 5, 500, -1])
def test_truncated_file(folder, model, kept_bytes):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors .*(too short|truncated)"):
        load(folder, model)


def test_not_a_safetensors_file(folder, model):
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    with pytest.raises(ModelLoadError, match="not a safetensors file"):
        load(folder, model)


def test_same_tensor_in_two_files(folder, model):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "b.safetensors")
    with pytest.raises(ModelLoadError, match="remove one of the files"):
        load(folder, model)


def test_configuration_that_disagrees_with_the_file(folder):
    source = resolve_model(str(folder))
    config = load_config(source)
    first = config.layers[0]
    halved = dataclasses.replace(first, attention=dataclasses.replace(first.attention, num_kv_heads=1))
    config = dataclasses.replace(config, layers=(halved, *config.layers[1:]))
    with pytest.raises(ModelLoadError, match=r"0\.self_attn\.k_proj\.weight has shape \[32, 64\], wanted \[16, 64\]"):
        load_weights(source, Model(config, torch.float32), cache_dir=folder)


def test_dtype_that_cannot_be_computed_with(folder, model):
    with pytest.raises(ConfigError, match=r"torch\.int8.*torch\.bfloat16"):
        load(folder, model, dtype=torch.int8)


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read as JSON"):
        load_config(resolve_model(str(folder)))


def test_generation_config_gives_the_end_tokens(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert load_config(resolve_model(str(folder))).eos_token_ids == (1, 5)


def test_dummy_weights_are_small_random_and_repeatable(folder, model):
    (folder / "model.safetensors").unlink()
    first = load(folder, model, dtype=torch.bfloat16, load_format="dummy")
    assert_same(load(folder, model, dtype=torch.bfloat16, load_format="dummy"), first)
    assert {name: tuple(value.shape) for name, value in first.items()} == native_shapes(model.config)
    assert first["norm.weight"].dtype == torch.float32
    assert first["embed_tokens.weight"].dtype == torch.bfloat16
    assert first["embed_tokens.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    assert first["norm.weight"].mean() == pytest.approx(1.0, abs=0.02)
    assert not torch.equal(first["layers.0.mlp.down_proj.weight"], first["layers.1.mlp.down_proj.weight"])


# The converted copy.


@pytest.fixture
def cached(folder, model, monkeypatch):
    """A folder with its converted copy made: (folder, cache_dir, path of the copy)."""
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    cache_dir = folder.parent / "cache"
    assert_same(load(folder, model, cache_dir=cache_dir), native_weights(model))
    (entry,) = cache_dir.rglob("*.safetensors")
    return folder, cache_dir, entry


def forbid_conversion(monkeypatch):
    def refuse(*args):
        raise AssertionError("converted again")

    monkeypatch.setattr(loading, "plan_parameters", refuse)


def test_small_checkpoints_are_not_copied(folder, model):
    load(folder, model, cache_dir=folder.parent / "cache")
    assert not (folder.parent / "cache").exists()


def test_copy_is_used_without_reading_the_checkpoint(cached, model, monkeypatch):
    folder, cache_dir, entry = cached
    forbid_conversion(monkeypatch)
    assert_same(load(folder, model, cache_dir=cache_dir), native_weights(model))
    assert_same(load_file(entry), native_weights(model))


def test_each_dtype_has_its_copy(cached, model, monkeypatch):
    folder, cache_dir, _ = cached
    wanted = load(folder, model, dtype=torch.bfloat16, cache_dir=cache_dir)
    assert len(list(cache_dir.rglob("*.safetensors"))) == 2
    forbid_conversion(monkeypatch)
    assert_same(load(folder, model, dtype=torch.bfloat16, cache_dir=cache_dir), wanted)
    assert_same(load(folder, model, cache_dir=cache_dir), native_weights(model))


@pytest.mark.parametrize("damage", ["cut", "cut header", "empty", "noise", "other shapes"])
def test_damaged_copy_is_made_anew(cached, model, monkeypatch, damage):
    folder, cache_dir, entry = cached
    good = entry.read_bytes()
    if damage == "other shapes":
        save_file({"norm.weight": torch.ones(64)}, entry)
    else:
        bad = {"cut": good[:-1], "cut header": good[:100], "empty": b"", "noise": b"\xff" * len(good)}
        entry.write_bytes(bad[damage])
    assert_same(load(folder, model, cache_dir=cache_dir), native_weights(model))
    assert entry.read_bytes() == good


def test_copy_of_an_older_checkpoint_is_replaced(cached, model):
    folder, cache_dir, entry = cached
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].fill_(0.5))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    found = load(folder, model, cache_dir=cache_dir)
    assert torch.equal(found["norm.weight"], torch.full((64,), 1.5))
    remaining, noted = sorted(path for path in cache_dir.rglob("*") if path.is_file())
    assert remaining != entry
    assert noted.name == remaining.name + ".sum"


def test_folder_that_cannot_be_written_costs_a_warning(folder, model, monkeypatch, caplog):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    blocker = folder.parent / "file"
    blocker.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert_same(load(folder, model, cache_dir=blocker / "cache"), native_weights(model))
    assert "cannot be kept" in caplog.text


def test_failed_write_leaves_nothing_behind(folder, model, monkeypatch, caplog):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lamella.model_executor.weights.cache_folder.os.replace", full_disk)
    assert_same(load(folder, model, cache_dir=folder.parent / "cache"), native_weights(model))
    assert [path for path in (folder.parent / "cache").rglob("*") if path.is_file()] == []
    assert "No space left" in caplog.text


def test_writing_to_loaded_weights_does_not_reach_the_copy(cached, model):
    folder, cache_dir, entry = cached
    good = entry.read_bytes()
    load(folder, model, cache_dir=cache_dir)["norm.weight"].fill_(7.0)
    assert entry.read_bytes() == good


def test_two_loads_at_once_share_one_good_copy(folder, model, monkeypatch):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    cache_dir = folder.parent / "cache"
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, folder, model, cache_dir=cache_dir) for _ in range(8)]
        for future in loads:
            assert_same(future.result(), native_weights(model))
    entry, noted = sorted(path for path in cache_dir.rglob("*") if path.is_file())
    assert noted.name == entry.name + ".sum"
    assert_same(load_file(entry), native_weights(model))
