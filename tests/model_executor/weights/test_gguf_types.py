"""Every storage format that the gguf package can expand, of random bytes, against its expansion of the whole tensor."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from lamella.model_executor.models.llama import LLAMA
from lamella.model_executor.weights.checkpoint import GgufCheckpoint

NUM_COLUMNS = 512  # whole blocks of every type
SHAPES = {"token_embd.weight": (6, NUM_COLUMNS), "output_norm.weight": (NUM_COLUMNS,)}
EXPERTS = "blk.0.ffn_up_exps.weight"


def can_be_expanded(storage):
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[storage][1]), np.uint8), storage)
    except NotImplementedError:
        return False
    return True


EXPANDED = [each.name for each in GGMLQuantizationType if can_be_expanded(each)]
OTHERS = [each.name for each in GGMLQuantizationType if not can_be_expanded(each)]


def test_the_lists_are_of_all_types():
    assert {"F32", "F16", "BF16", "Q8_0", "Q2_K", "IQ1_M", "TQ1_0", "MXFP4", "NVFP4"} <= set(EXPANDED)
    assert len(EXPANDED) >= 26
    assert {"I8", "F64", "Q8_K"} <= set(OTHERS)


def random_blocks(storage, shape, seed):
    """Bytes of blocks; numbers that a float may not be are as good as others, for reading is all that is done."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[storage]
    row_bytes = shape[-1] // elements * num_bytes
    return np.random.default_rng(seed).integers(0, 256, size=(*shape[:-1], row_bytes), dtype=np.uint8)


def save(path, storage):
    writer = gguf.GGUFWriter(path, "llama")
    written = {}
    for seed, (name, shape) in enumerate({**SHAPES, EXPERTS: (3, 4, NUM_COLUMNS)}.items()):
        if storage.name in ("F32", "F16"):
            values = np.random.default_rng(seed).standard_normal(shape)
            written[name] = values.astype(np.float32 if storage.name == "F32" else np.float16)
            writer.add_tensor(name, written[name])
        else:
            written[name] = random_blocks(storage, shape, seed)
            writer.add_tensor(name, written[name], raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def assert_same_bits(found, wanted):
    assert found.shape == wanted.shape
    assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(wanted, np.float32).view(np.uint32))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", EXPANDED)
def test_rows_are_those_of_the_whole_tensor(name, tmp_path):
    storage = GGMLQuantizationType[name]
    written = save(tmp_path / "m.gguf", storage)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf", LLAMA.weights)
    assert {each.problem for each in checkpoint.tensors.values()} == {None}

    def expanded(stored_name, shape):
        return gguf.quants.dequantize(written[stored_name], storage).reshape(shape).astype(np.float32)

    table = expanded("token_embd.weight", SHAPES["token_embd.weight"])
    for start, stop in ((0, 6), (2, 3), (1, 5)):
        found = checkpoint.read_rows("embed_tokens.weight", start, stop).float().numpy()
        assert_same_bits(found, table[start:stop])
    norm = expanded("output_norm.weight", (NUM_COLUMNS,))
    assert_same_bits(checkpoint.read_rows("norm.weight", 0, NUM_COLUMNS).float().numpy(), norm)
    experts = expanded(EXPERTS, (3, 4, NUM_COLUMNS))
    for expert in range(3):
        found = checkpoint.read_rows(f"layers.0.mlp.experts.{expert}.up_proj.weight", 1, 4).float().numpy()
        assert_same_bits(found, experts[expert, 1:4])


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_named(name, tmp_path):
    storage = GGMLQuantizationType[name]
    num_bytes = gguf.GGML_QUANT_SIZES[storage][1]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, num_bytes), np.uint8), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = GgufCheckpoint(tmp_path / "m.gguf", LLAMA.weights).tensors.values()
    assert tensor.problem == (
        f"token_embd.weight: stored in ggml type {int(storage)}, which the gguf package cannot convert"
    )
