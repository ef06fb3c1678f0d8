"""Models in several GGUF files, split by the gguf package's writer."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.loading import load_config, load_tokenizer, load_weights, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

# 6 layers of 13 tensors, the embeddings and the last norm.
NUM_PARTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_gemma(tmp_path_factory.mktemp("tiny"), sliding_window_pattern=6)


@pytest.fixture
def parts(model, tmp_path):
    """The parts of one model, in a folder of their own."""
    folder = tmp_path / "split"
    folder.mkdir()
    save_tiny_gguf(folder / "m.gguf", model, quantise="Q8_0", tensors_in_part=25)
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"m-{part:05}-of-00004.gguf" for part in range(1, NUM_PARTS + 1)]
    return paths


def load(path, cache_dir):
    source = resolve_model(str(path))
    return load_weights(source, Model(load_config(source), torch.float32), cache_dir=cache_dir)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_split_model_is_the_whole_one(model, parts, tmp_path):
    save_tiny_gguf(tmp_path / "whole.gguf", model, quantise="Q8_0")
    assert load_config(resolve_model(str(parts[0]))) == load_config(resolve_model(str(tmp_path / "whole.gguf")))
    assert_same(load(parts[0], tmp_path / "cache"), load(tmp_path / "whole.gguf", tmp_path / "cache"))
    tokenizer = load_tokenizer(resolve_model(str(parts[0])), tmp_path / "cache")
    assert tokenizer.encode("abc a") == load_tokenizer(
        resolve_model(str(tmp_path / "whole.gguf")), tmp_path / "cache"
    ).encode("abc a")


def test_a_folder_of_one_split_model_is_that_model(parts):
    assert resolve_model(str(parts[0].parent)).paths == tuple(parts)
    shutil.copy(parts[0], parts[0].with_name("other.gguf"))
    with pytest.raises(ModelLoadError, match="holds 5 GGUF files"):
        resolve_model(str(parts[0].parent))


def test_a_converted_copy_is_of_all_parts(model, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    first = load(parts[0], tmp_path / "cache")
    with torch.no_grad():
        model.model.layers[5].mlp.down_proj.weight.add_(1.0)
    try:
        save_tiny_gguf(parts[0].with_name("m.gguf"), model, quantise="Q8_0", tensors_in_part=25)
    finally:
        with torch.no_grad():
            model.model.layers[5].mlp.down_proj.weight.sub_(1.0)
    again = load(parts[0], tmp_path / "cache")
    differing = [name for name, value in first.items() if not torch.equal(again[name], value)]
    assert differing == ["layers.5.mlp.down_proj.weight"]


def test_every_part_has_to_be_there(parts):
    parts[1].unlink()
    parts[3].unlink()
    missing = r"2 of the 4 parts .* are not there: m-00002-of-00004\.gguf, m-00004-of-00004\.gguf"
    for path in (parts[0], parts[0].parent):
        with pytest.raises(ModelLoadError, match=missing):
            resolve_model(str(path))


@pytest.mark.parametrize("part", [1, 2, 3])
def test_the_first_part_is_the_one_to_name(parts, part):
    first = re.escape(str(parts[0]))
    with pytest.raises(
        ModelLoadError, match=rf"is part {part + 1} of 4 of a split model; pass its first part, {first}"
    ):
        resolve_model(str(parts[part]))


def test_numbers_that_no_part_has(tmp_path):
    for name in ("m-00000-of-00002.gguf", "m-00003-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(ModelLoadError, match="there is no part"):
            resolve_model(str(tmp_path / name))


def test_parts_are_found_by_name_and_held_against_their_numbers(model, parts, tmp_path):
    shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"renamed\.gguf: split\.count=4, but by its name there are 1"):
        load_config(resolve_model(str(tmp_path / "renamed.gguf")))
    save_tiny_gguf(tmp_path / "n-00001-of-00001.gguf", model)  # one part of one needs no keys
    load_config(resolve_model(str(tmp_path / "n-00001-of-00001.gguf")))
    third = parts[2].read_bytes()
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00004\.gguf: split\.no=1, and by its name it must be 2"):
        load_config(resolve_model(str(parts[0])))
    save_tiny_gguf(parts[2], model)
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00004\.gguf: split\.no=-1"):
        load_config(resolve_model(str(parts[0])))
    parts[2].write_bytes(third)
    load_config(resolve_model(str(parts[0])))


def test_parts_of_two_models_are_told_apart(model, parts):
    """Of another conversion: as many parts, cut elsewhere."""
    other = parts[0].with_name("other.gguf")
    for tensors_in_part, part, reason in (
        (24, 2, r"m-00003-of-00004\.gguf holds the tensor '\S+', and so does m-00002-of-00004\.gguf"),
        (26, 3, r"split\.tensors\.count=\d+, but its 4 parts hold \d+"),
    ):
        save_tiny_gguf(other, model, quantise="Q8_0", tensors_in_part=tensors_in_part)
        paths = sorted(parts[0].parent.glob("other-*"))
        assert len(paths) == NUM_PARTS
        own = parts[part].read_bytes()
        shutil.copy(paths[part], parts[part])
        with pytest.raises(ModelLoadError, match=reason):
            read_gguf_model(parts[0])
        parts[part].write_bytes(own)


def test_a_cut_part_is_named(parts, tmp_path):
    data = parts[1].read_bytes()
    parts[1].write_bytes(data[:60])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00004\.gguf is truncated"):
        load_config(resolve_model(str(parts[0])))
    parts[1].write_bytes(data[:-400])
    with pytest.raises(ModelLoadError, match=r"its data ends at byte \d+ but the file is \d+ bytes long"):
        load(parts[0], tmp_path / "cache")
