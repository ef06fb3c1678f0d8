"""Rows of Q and K as llama.cpp's converter leaves them, put back as the model has them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights import conversion
from lamella.model_executor.weights.checkpoint import GgufCheckpoint
from lamella.model_executor.weights.conversion import ParameterPlan, converted_pieces
from lamella.model_executor.weights.gguf_form import GgufBlocks
from lamella.model_executor.weights.parameters import Parameter, Part
from lamella.model_executor.weights.row_pairs import unpaired

SHAPES = [(1, 4), (2, 6), (3, 16), (5, 2)]  # heads, rows of each
NUM_IN = 32


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def numbered(num_heads: int, head_rows: int, num_in: int = NUM_IN) -> np.ndarray:
    num_rows = num_heads * head_rows
    return np.random.default_rng(num_rows).standard_normal((num_rows, num_in)).astype(np.float32)


@pytest.mark.parametrize(("num_heads", "head_rows"), SHAPES)
def test_what_the_converter_did_is_undone(num_heads: int, head_rows: int) -> None:
    rows = numbered(num_heads, head_rows)
    stored = permuted(rows, num_heads)
    assert np.array_equal(unpaired(stored, head_rows), rows)
    assert torch.equal(unpaired(torch.from_numpy(stored), head_rows), torch.from_numpy(rows))
    assert np.array_equal(unpaired(stored[:, 0], head_rows), rows[:, 0]), "biases have no second dimension"
    theirs = LlamaTensorProcessor()._reverse_permute_weights(stored, num_heads, num_heads)
    assert np.array_equal(unpaired(stored, head_rows), theirs)
    assert head_rows == 2 or not np.array_equal(stored, rows), "or the test could not fail"


NUM_HEADS, NUM_KV_HEADS, HEAD_ROWS = 6, 2, 16
MAPS = {"in pairs": WeightMap(gguf_pairs=True), "in halves": WeightMap()}
PARTS = (
    Part("layers.0.self_attn.q_proj.weight", NUM_HEADS * HEAD_ROWS, HEAD_ROWS),
    Part("layers.0.self_attn.k_proj.weight", NUM_KV_HEADS * HEAD_ROWS, HEAD_ROWS),
    Part("layers.0.self_attn.v_proj.weight", NUM_KV_HEADS * HEAD_ROWS),
)
BIASES = tuple(part._replace(name=part.name.replace("weight", "bias")) for part in PARTS)
NUM_ROWS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_ROWS


def write(path: Path, *, in_pairs: bool, quantise: str) -> dict[str, torch.Tensor]:
    """A layer's Q, K and V with biases; V's rows are never moved. Returns the parameters as the model has them, before
    quantising."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    storage = gguf.GGMLQuantizationType[quantise]
    weights, biases = [], []
    for name, num_heads in (("attn_q", NUM_HEADS), ("attn_k", NUM_KV_HEADS), ("attn_v", NUM_KV_HEADS)):
        weight = rng.standard_normal((num_heads * HEAD_ROWS, NUM_IN)).astype(np.float32)
        bias = rng.standard_normal(num_heads * HEAD_ROWS).astype(np.float32)
        weights.append(torch.from_numpy(weight))
        biases.append(torch.from_numpy(bias))
        if in_pairs and name != "attn_v":
            weight, bias = permuted(weight, num_heads), permuted(bias, num_heads)
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(weight, storage), raw_dtype=storage)
        writer.add_tensor(f"blk.0.{name}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"weight": torch.cat(weights), "bias": torch.cat(biases)}


def plans() -> list[ParameterPlan]:
    name = "layers.0.self_attn.qkv_proj"
    return [
        ParameterPlan(f"{name}.weight", (NUM_ROWS, NUM_IN), torch.float32, PARTS),
        ParameterPlan(f"{name}.bias", (NUM_ROWS,), torch.float32, BIASES),
    ]


@pytest.mark.parametrize("piece_elements", [1, 20 * NUM_IN, 1 << 20], ids=["a head", "a head and a bit", "all"])
@pytest.mark.parametrize("name", MAPS)
def test_pieces_are_of_whole_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece_elements: int):
    monkeypatch.setattr(conversion, "_PIECE_ELEMENTS", piece_elements)
    written = write(tmp_path / "m.gguf", in_pairs=name == "in pairs", quantise="F32")
    found = {"weight": torch.full((NUM_ROWS, NUM_IN), torch.nan), "bias": torch.full((NUM_ROWS,), torch.nan)}
    for piece in converted_pieces(GgufCheckpoint(tmp_path / "m.gguf", MAPS[name]), plans()):
        ending = piece.plan.name.rpartition(".")[2]
        found[ending][piece.row_start : piece.row_start + len(piece.values)] = piece.values
    for ending, values in written.items():
        assert torch.equal(found[ending], values)


@pytest.mark.parametrize("quantise", ["Q8_0", "Q4_0", "F32", "BF16"])
def test_blocks_are_those_of_a_file_that_has_the_rows_in_halves(tmp_path: Path, quantise: str) -> None:
    """A row is quantised by itself, so that its blocks move with it."""
    made = {}
    for name, names in MAPS.items():
        path = tmp_path / f"{name}.gguf"
        written = write(path, in_pairs=name == "in pairs", quantise=quantise)
        checkpoint = GgufCheckpoint(path, names)
        parameters = [Parameter(plan.name, plan.shape, plan.parts) for plan in plans()]
        pieces = list(GgufBlocks(checkpoint, parameters).pieces(checkpoint, plans()))
        bias = [values for stored, values in pieces if stored.endswith(".bias")]
        assert torch.equal(torch.cat(bias), written["bias"])
        made[name] = [(stored, values) for stored, values in pieces if not stored.endswith(".bias")]
    assert [stored for stored, _ in made["in pairs"]] == [stored for stored, _ in made["in halves"]]
    assert len(made["in pairs"]) == 3
    for (_, found), (_, expected) in zip(made["in pairs"], made["in halves"], strict=True):
        assert torch.equal(found, expected)
