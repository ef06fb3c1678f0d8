"""GGUF files for transformers models: config, names, values and order of rows are those of transformers' own reading,
which takes far longer."""

from __future__ import annotations

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.gguf_weights import gguf_state_dict
from lamella.model_executor.models.transformers_backend.text_config import class_for, read_configs
from lamella.model_executor.weights.gguf_header import read_gguf_header
from lamella.model_executor.weights.gguf_split import read_gguf_model
from tests.helpers.random_gguf import save_random_gguf
from tests.helpers.random_models import draw_config, random_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

# With rows of Q and K in pairs, with norms that have 1 added, with biases, with experts, and without a size of the
# vocabulary; what the format has no place for is left out of the config.
MODELS = {
    "llama": {},
    "gemma2": {
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0,
    },
    "qwen2": {},
    "qwen3_moe": {"mlp_only_layers": None, "decoder_sparse_step": 1},
    "starcoder2": {},
}


def saved_model(path, name):
    drawn = draw_config(name, 0)
    settings = drawn.to_dict() | MODELS[name]
    for key in ("transformers_version", "model_type"):
        del settings[key]
    save_random_gguf(path, name, random_model(type(drawn)(**settings)))


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_are_those_that_transformers_reads(name, tmp_path):
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    saved_model(path, name)
    header = read_gguf_header(path)
    config, text_config = read_configs(tmp_path, header)
    assert config.to_dict() == AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()

    run_by = class_for(config, text_config)
    given = gguf_state_dict(header, run_by.model_class, run_by.config)
    with torch.device("meta"):
        model = run_by.model_class._from_config(run_by.config)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[each], expected[each]) for each in expected)


def test_a_split_model_is_the_whole_one(tmp_path):
    model = save_tiny_gemma(tmp_path / "folder")
    save_tiny_gguf(tmp_path / "whole.gguf", model, quantise="Q8_0")
    (tmp_path / "parts").mkdir()
    save_tiny_gguf(tmp_path / "parts" / "m.gguf", model, quantise="Q8_0", tensors_in_part=9)
    found = []
    for path in (tmp_path / "whole.gguf", min((tmp_path / "parts").iterdir())):
        header = read_gguf_model(path)
        config, text_config = read_configs(path.parent, header)
        run_by = class_for(config, text_config)
        found.append((config.to_dict(), gguf_state_dict(header, run_by.model_class, run_by.config), header))
    (whole_config, whole, _), (config, tensors, header) = found
    assert len(header.files) > 2
    assert {**config, "_name_or_path": None} == {**whole_config, "_name_or_path": None}
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[each], whole[each]) for each in whole)


def test_the_file_alone_is_read_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    save_tiny_gguf(path, save_tiny_gemma(tmp_path / "folder"))
    config, text_config = read_configs(tmp_path, read_gguf_header(path))
    run_by = class_for(config, text_config)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match=r"its data ends at byte \d+ but the file is \d+ bytes long"):
        gguf_state_dict(read_gguf_header(path), run_by.model_class, run_by.config)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "model.gguf"]
