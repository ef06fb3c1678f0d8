"""The model's folder is the one that was given: no file leads out of it, and only regular files are opened."""

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights.loading import load_config, load_sampling_defaults, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_weights, save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

SMALL = {"num_hidden_layers": 2, "sliding_window_pattern": 2}


def load(source, tmp_path):
    return load_weights(source, Model(load_config(source), torch.float32), cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    save_tiny_gemma(path, **SMALL)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def write_index(folder, name):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside/m.safetensors",
        "/{absolute}/m.safetensors",
        "sub/m.safetensors",
        "./m.safetensors",
        "sub/../m.safetensors",
        "..\\outside\\m.safetensors",
        "C:m.safetensors",
        "C:\\m.safetensors",
        "\\\\server\\share\\m.safetensors",
        "m.safetensors\0",
        "..",
        "",
        "model.bin",
        "m.safetensors/",
    ],
)
def test_a_shard_outside_of_the_folder_is_refused(folder, tmp_path, name):
    """Not even where the file is there, with a configuration beside it that would be taken for the model's."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "sub").mkdir()
    save_file(load_file(folder / "model.safetensors"), outside / "m.safetensors", metadata={"format": "pt"})
    for place in (folder, folder / "sub"):
        (place / "m.safetensors").write_bytes((outside / "m.safetensors").read_bytes())
    (outside / "config.json").write_text("{}")
    write_index(folder, name.replace("{absolute}", str(outside).strip("/")))
    with pytest.raises(ModelLoadError, match=r"index\.json: weight_map\..*: must be the plain name"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "weight_map", [None, [], "m.safetensors", {}, {"a": 1}, {"a": None}, {"a": ["m.safetensors"]}, {"a": "\ud800"}]
)
def test_an_index_of_another_kind_is_refused(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        resolve_model(str(folder))


def test_the_folder_is_the_one_given_whatever_links_lead_to(tmp_path):
    """A hub's cache: the snapshot holds links to blobs, which lie elsewhere and have other names."""
    model = save_tiny_gemma(tmp_path / "download", max_shard_size="60KB", **SMALL)
    (tmp_path / "download" / "generation_config.json").write_text('{"eos_token_id": [1, 5], "top_k": 7}')
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "download").iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (blobs / "config.json").write_text("{}")  # never read
    source = resolve_model(str(snapshot))
    assert source.folder == snapshot
    assert len(source.paths) > 2
    assert load_config(source).eos_token_ids == (1, 5)
    assert load_sampling_defaults(source) == {"top_k": 7}
    wanted = native_weights(model)
    found = load(source, tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_folder_of_a_gguf_file_is_its_own(tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", save_tiny_gemma(tmp_path / "model", **SMALL))
    assert resolve_model(str(tmp_path / "m.gguf")).folder == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf"), "dummy").folder == tmp_path


def replace_by(kind, path):
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(path.parent)  # the path itself may be longer than sockets allow
            listener.bind(path.name)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a socket"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "m.gguf"]
)
def test_what_is_no_regular_file_is_not_opened(folder, tmp_path, monkeypatch, name, kind):
    """Opening a pipe would wait for its writer, and reading a device would not end."""
    monkeypatch.chdir(tmp_path)
    path = folder / name
    replace_by(kind, path)
    model = str(path if name == "m.gguf" and kind != "a folder" else folder)
    load_format = "gguf" if name == "m.gguf" else "auto"
    with pytest.raises(ModelLoadError, match=f"{name} is {kind}, not a regular file"):
        load_config(resolve_model(model, load_format))


@pytest.mark.parametrize("name", ["shard.safetensors", "model.safetensors"])
def test_a_pipe_among_the_shards_is_not_opened(folder, name):
    write_index(folder, name)
    replace_by("a pipe", folder / name)
    with pytest.raises(ModelLoadError, match=f"{name} is a pipe, not a regular file"):
        load_config(resolve_model(str(folder)))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_link_to_nowhere_is_told(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("nowhere")
    with pytest.raises(ModelLoadError, match=f"{name} cannot be read"):
        load_config(resolve_model(str(folder)))


@pytest.mark.parametrize("model", ["a\0b", "~nobody-of-this-name/m", "x" * 5000])
def test_names_that_no_system_can_hold_are_not_found(model):
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve_model(model)
