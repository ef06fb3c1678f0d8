"""A split GGUF model joined to one file: another reader finds in it what the whole one has."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.gguf_header import read_gguf_header
from lamella.model_executor.weights.gguf_joined import joined_file
from lamella.model_executor.weights.gguf_split import read_gguf_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf


@pytest.fixture
def split(tmp_path):
    """(the whole model's file, the header of the split one)"""
    model = save_tiny_gemma(tmp_path / "hf", num_hidden_layers=2, sliding_window_pattern=2)
    (tmp_path / "parts").mkdir()
    save_tiny_gguf(tmp_path / "whole.gguf", model, quantise="Q8_0")
    save_tiny_gguf(tmp_path / "parts" / "m.gguf", model, quantise="Q8_0", tensors_in_part=9)
    return tmp_path / "whole.gguf", read_gguf_model(min((tmp_path / "parts").iterdir()))


def test_the_joined_file_is_the_whole_one(split):
    whole, header = split
    assert len(header.files) > 2
    wanted = {each.name: each for each in gguf.GGUFReader(whole).tensors}
    with joined_file(header, has_data=True) as path:
        reader = gguf.GGUFReader(path)
        found = {each.name: each for each in reader.tensors}
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name].tensor_type, list(found[name].shape)) == (tensor.tensor_type, list(tensor.shape))
            assert np.array_equal(found[name].data, tensor.data), name
        assert reader.fields["general.architecture"].contents() == "gemma3"
        own = read_gguf_header(path)
        assert {name: (each.shape, each.type_id) for name, each in own.tensors.items()} == {
            name: (each.shape, each.type_id) for name, each in header.tensors.items()
        }
        del reader, found
    assert not path.parent.exists()


def test_without_data_names_and_metadata_are_there(split):
    _, header = split
    with joined_file(header, has_data=False) as path:
        assert {each.name for each in gguf.GGUFReader(path).tensors} == set(header.tensors)


def test_a_file_that_is_not_split_is_itself(split):
    whole, _ = split
    with joined_file(read_gguf_model(whole), has_data=True) as path:
        assert path == whole
    assert whole.exists()


def test_what_cannot_be_joined_is_told_and_leaves_nothing(split, tmp_path, monkeypatch):
    _, header = split
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = next(iter(header.tensors))
    odd = replace(header, tensors={**header.tensors, name: replace(header.tensors[name], type_id=4711)})
    with pytest.raises(ModelLoadError, match="ggml type 4711"), joined_file(odd, has_data=True):
        pass
    last = header.files[-1].path
    last.write_bytes(last.read_bytes()[:-100])
    told = f"{last.name} ends before its tensors"
    with pytest.raises(ModelLoadError, match=told), joined_file(header, has_data=True):
        pass
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(ModelLoadError, match="cannot be joined"), joined_file(header, has_data=True):
        pass
    assert not list(tmp_path.glob("lamella-gguf-*"))
