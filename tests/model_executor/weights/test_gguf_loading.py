import struct

import gguf
import numpy as np
import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import MLPConfig
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.gguf_header import read_gguf_header
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_shapes, native_weights, save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # llama.cpp has no key for the pattern in most files: every sixth layer is full.
    return save_tiny_gemma(tmp_path_factory.mktemp("tiny"), sliding_window_pattern=6)


def load(path, model, cache_dir):
    source = resolve_model(str(path))
    return load_weights(source, Model(load_config(source), torch.float32), cache_dir=cache_dir)


def test_unquantised_file_equals_the_model(model, tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", model)
    found = load(tmp_path / "m.gguf", model, tmp_path / "cache")
    wanted = native_weights(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("quantise", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0"])
def test_quantised_matrices_equal_the_reference_conversion(model, tmp_path, quantise):
    path = tmp_path / "m.gguf"
    written = save_tiny_gguf(path, model, quantise=quantise)
    found = load(path, model, tmp_path / "cache")
    storage = gguf.GGMLQuantizationType[quantise]

    def reference(name):
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(written[name], storage), storage))

    for layer in range(6):
        qkv = torch.cat([reference(f"blk.{layer}.attn_{part}.weight") for part in "qkv"])
        assert torch.equal(found[f"layers.{layer}.self_attn.qkv_proj.weight"], qkv)
        gate_up = torch.cat([reference(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up")])
        assert torch.equal(found[f"layers.{layer}.mlp.gate_up_proj.weight"], gate_up)
        assert torch.equal(found[f"layers.{layer}.mlp.down_proj.weight"], reference(f"blk.{layer}.ffn_down.weight"))
        norm = torch.from_numpy(written[f"blk.{layer}.ffn_norm.weight"])
        assert torch.equal(found[f"layers.{layer}.mlp_norm.weight"], norm)
    assert torch.equal(found["embed_tokens.weight"], reference("token_embd.weight"))


def test_tensors_of_towers_are_left_out_and_counted_once(model, tmp_path, caplog):
    """Names of the gguf package's own tables."""
    templates = gguf.constants.TENSOR_NAMES
    kinds = gguf.constants.MODEL_TENSOR
    vision = [templates[each].format(bid=0) + ".weight" for each in (kinds.V_ENC_EMBD_PATCH, kinds.V_ENC_ATTN_Q)]
    projector = [templates[kinds.V_MMPROJ].format(bid=0) + ".weight", "mm.input_projection.weight"]
    audio = [templates[kinds.A_ENC_CONV1D].format(bid=1) + ".weight"]
    more = {name: np.ones((3, 4), np.float32) for name in (*vision, *projector, *audio, "mm.a.fc.weight")}
    save_tiny_gguf(tmp_path / "m.gguf", model, more_tensors=more)
    with caplog.at_level("INFO"):
        found = load(tmp_path / "m.gguf", model, tmp_path / "cache")
    wanted = native_weights(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 1
    for part in ("the vision tower (2 tensors)", "the vision projector (2 tensors)", "the audio tower (1 tensors)"):
        assert part in said[0]
    save_tiny_gguf(tmp_path / "m.gguf", model, more_tensors={"vv.x.weight": np.ones((3, 4), np.float32)})
    with pytest.raises(ModelLoadError, match=r"vv\.x\.weight"):
        load(tmp_path / "m.gguf", model, tmp_path / "cache")


def test_config_from_metadata(model, tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", model)
    config = load_config(resolve_model(str(tmp_path / "m.gguf")))
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("gemma3", 320, 64)
    assert {layer.mlp for layer in config.layers} == {MLPConfig(96, "gelu_tanh")}
    attentions = [layer.attention for layer in config.layers]
    assert {(each.num_heads, each.num_kv_heads, each.k_dim, each.v_dim) for each in attentions} == {(4, 2, 16, 16)}
    assert {each.scale for each in attentions} == {0.25}
    assert config.max_position_embeddings == 512
    assert config.norm_eps == pytest.approx(1e-6)
    assert [each.kind for each in attentions] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (attentions[0].window_tokens, attentions[0].rotary.theta) == (16, 10_000.0)
    assert (attentions[5].window_tokens, attentions[5].rotary.theta) == (None, 1_000_000.0)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (2, (1,), True)
    assert config.dtype == "float32"


def test_optional_metadata(model, tmp_path):
    save_tiny_gguf(
        tmp_path / "m.gguf",
        model,
        quantise="BF16",
        gemma3__rope__scaling__type="linear",
        gemma3__rope__scaling__factor=8.0,
        gemma3__rope__freq_base_swa=20_000.0,
        gemma3__final_logit_softcapping=30.0,
        gemma3__attention__sliding_window_pattern=[True, False, True, True, False, True],
        tokenizer__ggml__eot_token_id=9,
        tokenizer__chat_template="{{ messages }}<end_of_turn>",
    )
    config = load_config(resolve_model(str(tmp_path / "m.gguf")))
    attentions = [layer.attention for layer in config.layers]
    assert [each.kind == "full_attention" for each in attentions] == [False, True, False, False, True, False]
    assert (attentions[1].rotary.position_divisor, attentions[0].rotary.position_divisor) == (8.0, 1.0)
    assert attentions[0].rotary.theta == 20_000.0
    assert config.final_logit_softcap == 30.0
    assert config.eos_token_ids == (1, 9, 4)
    assert config.dtype == "bfloat16"


def test_27b_scales_queries_by_hidden_size_per_head(tmp_path):
    model = save_tiny_gemma(tmp_path / "hf", num_hidden_layers=62, hidden_size=32, head_dim=16)
    save_tiny_gguf(tmp_path / "m.gguf", model)
    config = load_config(resolve_model(str(tmp_path / "m.gguf")))
    assert {layer.attention.scale for layer in config.layers} == {8**-0.5}


def test_metadata_that_is_not_built(model, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, model, gemma3__rope__scaling__type="yarn")
    with pytest.raises(ModelLoadError, match="'yarn' is not built"):
        load_config(resolve_model(str(path)))
    save_tiny_gguf(path, model, general__architecture_note="x")
    path.write_bytes(path.read_bytes().replace(b"\x06\0\0\0\0\0\0\0gemma3", b"\x06\0\0\0\0\0\0\0llama9", 1))
    with pytest.raises(ModelLoadError, match="'llama9' is not known; known: gemma3"):
        load_config(resolve_model(str(path)))


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        load_config(resolve_model(str(path)))
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="too short"):
        load_config(resolve_model(str(path)))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelLoadError, match="version 1"):
        load_config(resolve_model(str(path)))


def test_every_cut_inside_the_header_is_noticed(model, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, model)
    whole = path.read_bytes()
    first_data_byte = min(tensor.offset_bytes for tensor in read_gguf_header(path).tensors.values())
    for kept_bytes in range(24, first_data_byte - 32, 97):
        path.write_bytes(whole[:kept_bytes])
        with pytest.raises(ModelLoadError, match="truncated"):
            read_gguf_header(path)


def test_cut_inside_the_data_names_the_tensor(model, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, model)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelLoadError, match=r"its data ends at byte \d+ but the file is \d+ bytes long"):
        load(path, model, tmp_path / "cache")


def test_storage_that_cannot_be_converted(model, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, model)
    offset = path.read_bytes().index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    data = bytearray(path.read_bytes())
    assert data[offset : offset + 4] == b"\0\0\0\0"  # F32
    data[offset] = 99
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight: stored in ggml type 99"):
        load(path, model, tmp_path / "cache")


def test_converted_copy_serves_without_opening_the_file(model, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    save_tiny_gguf(tmp_path / "m.gguf", model, quantise="Q8_0")
    first = load(tmp_path / "m.gguf", model, tmp_path / "cache")
    monkeypatch.setattr(loading, "plan_parameters", None)
    again = load(tmp_path / "m.gguf", model, tmp_path / "cache")
    assert all(torch.equal(first[name], value) for name, value in again.items())
    assert first.keys() == again.keys()


def test_dummy_from_metadata(model, tmp_path):
    save_tiny_gguf(tmp_path / "m.gguf", model)
    source = resolve_model(str(tmp_path / "m.gguf"), "dummy")
    assert load_config(source).num_layers == 6
    weights = load_weights(source, Model(load_config(source), torch.float16), cache_dir=tmp_path)
    assert {name: tuple(value.shape) for name, value in weights.items()} == native_shapes(model.config)
    assert weights["norm.weight"].shape == (64,)


def test_metadata_equals_the_reference_reader(model, tmp_path):
    path = tmp_path / "m.gguf"
    save_tiny_gguf(path, model, quantise="Q8_0", gemma3__final_logit_softcapping=2.5, general__note="h\u00e9")
    header = read_gguf_header(path, string_arrays=("tokenizer.ggml.tokens",))
    reference = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, value in fields.items():
        assert np.array_equal(header.metadata[name], value), name
    assert {t.name: (t.shape, t.offset_bytes, t.type_id) for t in header.tensors.values()} == {
        t.name: (tuple(int(n) for n in t.shape[::-1]), t.data_offset, t.tensor_type) for t in reference.tensors
    }
