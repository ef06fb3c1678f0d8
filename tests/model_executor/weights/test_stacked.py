"""Experts that a file holds in one tensor, and MXFP4 blocks: every expert's matrix, against transformers and torch."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import LLM, SamplingParams
from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.registry import FAMILIES, parse_config, weight_map
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from lamella.model_executor.weights.conversion import plan_parameters
from lamella.model_executor.weights.gguf_form import GgufBlocks
from lamella.model_executor.weights.loading import load_config, resolve_model
from lamella.model_executor.weights.mxfp4 import as_gguf, dequantize
from lamella.model_executor.weights.stacked import ExpertStack
from lamella.native.gguf_linear import gather_rows_gguf, pack_gguf
from tests.helpers.random_gguf import save_random_gguf
from tests.helpers.tiny_decoders import greedy_tokens
from tests.helpers.tiny_experts import save_tiny_experts

EXPERTS, ROWS, COLUMNS = 3, 10, 6  # rows of gate and up together


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks_and_scales(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [*shape, 16] and [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 128, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_matrix_of_one_expert(is_transposed, is_interleaved, tmp_path):
    stored = random(EXPERTS, ROWS, COLUMNS)
    if is_interleaved:
        gate, up = stored[:, ::2], stored[:, 1::2]
    else:
        gate, up = stored.chunk(2, dim=1)
    name, parts = "mlp.experts.gate_up_proj", ("gate_proj", "up_proj")
    tensors = {f"model.layers.2.{name}": (stored.mT if is_transposed else stored).contiguous()}
    tensors[f"model.layers.2.{name}_bias"] = stored[..., 0].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    stack = ExpertStack(parts, is_transposed=is_transposed, is_interleaved=is_interleaved)
    biases = ExpertStack(parts, is_interleaved=is_interleaved, ending="bias")
    names = WeightMap(safetensors_stacks={name: stack, f"{name}_bias": biases})
    checkpoint = SafetensorsCheckpoint([tmp_path / "model.safetensors"], names)
    assert len(checkpoint.tensors) == 4 * EXPERTS
    for expert in range(EXPERTS):
        for part, expected in (("gate_proj", gate[expert]), ("up_proj", up[expert])):
            place = f"layers.2.mlp.experts.{expert}.{part}"
            assert checkpoint.tensors[f"{place}.weight"].shape == (ROWS // 2, COLUMNS)
            assert torch.equal(checkpoint.read_rows(f"{place}.weight", 0, ROWS // 2), expected)
            assert torch.equal(checkpoint.read_rows(f"{place}.weight", 1, 4), expected[1:4])
            assert torch.equal(checkpoint.read_rows(f"{place}.bias", 1, 5), expected[1:5, 0])


def test_blocks_are_dequantised_as_transformers_does_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = blocks_and_scales(2, 12, 3)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # transposed
    assert torch.equal(dequantize(blocks, scales), expected.mT)


def test_gate_and_up_of_a_gguf_file_in_one_tensor(tmp_path):
    """llama.cpp's converter can write them so for every family; blocks of rows are taken from the middle of it."""
    import gguf

    stored = random(EXPERTS, ROWS, 64).numpy()
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "some")
    blocks = gguf.quants.quantize(stored, q8)
    writer.add_tensor("blk.2.ffn_gate_up_exps.weight", blocks, raw_dtype=q8)
    writer.add_tensor("blk.2.ffn_gate_up_exps.bias", np.ascontiguousarray(stored[..., 0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf", WeightMap())
    values = gguf.quants.dequantize(blocks, q8)
    for expert in range(EXPERTS):
        for part, rows in (("gate_proj", slice(0, ROWS // 2)), ("up_proj", slice(ROWS // 2, ROWS))):
            name = f"layers.2.mlp.experts.{expert}.{part}"
            assert checkpoint.tensors[f"{name}.weight"].shape == (ROWS // 2, 64)
            read = checkpoint.read_rows(f"{name}.weight", 1, 4)
            assert np.array_equal(read.numpy(), values[expert, rows][1:4])
            assert np.array_equal(checkpoint.read_blocks(f"{name}.weight", 1, 4), blocks[expert, rows][1:4])
            assert np.array_equal(checkpoint.read_rows(f"{name}.bias", 1, 4).numpy(), stored[expert, rows, 0][1:4])


def test_blocks_as_gguf_has_them():
    import gguf

    blocks, scales = blocks_and_scales(12, 3)
    repacked = as_gguf(blocks, scales)
    found = gguf.quants.dequantize(repacked, gguf.GGMLQuantizationType.MXFP4)
    expected = dequantize(blocks, scales)
    assert torch.equal(torch.from_numpy(found), expected)
    weight = pack_gguf(repacked, "MXFP4")
    assert torch.equal(gather_rows_gguf(weight, torch.arange(12)), expected)


def test_every_scale_that_a_block_can_keep():
    blocks, _ = blocks_and_scales(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    weight = pack_gguf(as_gguf(blocks[:253], scales[:253]), "MXFP4")
    assert torch.equal(gather_rows_gguf(weight, torch.arange(253)), dequantize(blocks[:253], scales[:253]))
    for wrong in (253, 254, 255):
        with pytest.raises(ConfigError, match=rf"an MXFP4 block has the scale 2\^{wrong - 127}; .* is 2\^125"):
            pack_gguf(as_gguf(blocks[wrong : wrong + 1], scales[wrong : wrong + 1]), "MXFP4")
    zeros = torch.full_like(blocks, 0x80)  # a zero and a negative zero
    weight = pack_gguf(as_gguf(zeros, scales), "MXFP4")
    assert torch.equal(gather_rows_gguf(weight, torch.arange(256)), torch.zeros(256, 32))


def in_mxfp4(folder: Path, model: Any) -> None:
    """Write `model` again with its experts in blocks; their numbers become the model's."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    for layer, decoder in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(decoder.mlp.experts, name)  # [experts, inputs, outputs]
            blocks, scales = blocks_and_scales(weight.shape[0], weight.shape[2], weight.shape[1] // 32, seed=layer)
            scales -= 2
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            place = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[place]
            tensors |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_model_in_mxfp4(tmp_path, caplog):
    """The native path keeps blocks, and gets the same bits from them as from floats."""
    model = save_tiny_experts(tmp_path, "gpt-oss")
    in_mxfp4(tmp_path, model)
    prompts = [np.random.default_rng(seed).integers(6, 320, 20).tolist() for seed in range(2)]
    expected = [greedy_tokens(model, prompt, 5) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    results = []
    for backend, quantization in (("native", None), ("native", "none"), ("torch", None), ("native", "int8")):
        settings: dict[str, Any] = {"attention_backend": backend, "quantization": quantization}
        with caplog.at_level(logging.INFO):
            llm = LLM(str(tmp_path), max_model_len=64, kv_cache_memory_bytes=2**22, **settings)
        with llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        if quantization != "int8":
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        results.append([output.outputs[0].logprobs for output in outputs])
    assert results[0] == results[1]
    records = [record for record in caplog.records if "MXFP4" in record.getMessage()]
    told = [record.getMessage() for record in records]
    assert len(told) == 4
    weights = [
        getattr(layer.mlp.experts, name) for layer in model.model.layers for name in ("gate_up_proj", "down_proj")
    ]
    num_weights = sum(each.numel() for each in weights)
    in_panels = sum(each.numel() // each.shape[1] * -(-each.shape[1] // 128) * 128 for each in weights)
    bits = [each.args[1] * 1e9 * 8 / num_weights for each in records]
    assert bits == pytest.approx([4.25 * in_panels / num_weights, 32, 32, 8 + 32 * 4 / 128], rel=0.2)
    assert bits[0] == pytest.approx(4.25 * in_panels / num_weights)
    assert [text.split(" as ")[1].split(",")[0] for text in told] == ["'gguf'", "'panels'", "'rows'", "'int8'"]


def test_a_gguf_file_in_mxfp4(tmp_path):
    """Its blocks as they are give the bits that they give as floats."""
    (tmp_path / "folder").mkdir()
    model = save_tiny_experts(tmp_path / "folder", "gpt-oss")
    save_random_gguf(tmp_path / "m.gguf", "gpt_oss", model, experts_type="MXFP4")
    prompts = [np.random.default_rng(seed).integers(6, 320, 20).tolist() for seed in range(2)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    results = []
    for quantization in ("gguf", "none"):
        settings: dict[str, Any] = {"attention_backend": "native", "quantization": quantization}
        with LLM(str(tmp_path / "m.gguf"), max_model_len=64, kv_cache_memory_bytes=2**22, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert results[0] == results[1]
    config = load_config(resolve_model(str(tmp_path / "m.gguf")))
    blocks = GgufBlocks(
        GgufCheckpoint(tmp_path / "m.gguf", weight_map(config)), Model(config, torch.float32).parameters()
    )
    for layer in range(4):
        for projection in ("gate_up_proj", "down_proj"):
            parts = blocks.parts(f"layers.{layer}.mlp.experts.{projection}.weight")
            assert {part.type_name for part in parts} == {"MXFP4"}


def test_scales_that_are_missing(tmp_path):
    names = next(family.weights for family in FAMILIES if family.name == "gpt_oss")
    blocks, _ = blocks_and_scales(2, 4, 1)
    save_file({"model.layers.0.mlp.experts.down_proj_blocks": blocks}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint([tmp_path / "model.safetensors"], names)
    problem = checkpoint.tensors["layers.0.mlp.experts.1.down_proj.weight"].problem
    assert problem is not None
    assert "down_proj_scales, the scales of its blocks, is missing" in problem


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        (
            torch.zeros(2, 4, 2, dtype=torch.uint8),
            r"down_proj_scales has shape \[2, 4, 2\]; the blocks of .* \[2, 4, 1\]",
        ),
        (torch.zeros(2, 3, 1, dtype=torch.uint8), r"down_proj_scales has shape \[2, 3, 1\]"),
        (torch.zeros(2, 4, 1, dtype=torch.int8), "down_proj_scales: dtype I8 is not read; known: U8"),
    ],
)
def test_scales_that_are_not_those_of_the_blocks(tmp_path, scales, told):
    names = next(family.weights for family in FAMILIES if family.name == "gpt_oss")
    blocks, _ = blocks_and_scales(2, 4, 1)
    stem = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{stem}_blocks": blocks, f"{stem}_scales": scales}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint([tmp_path / "model.safetensors"], names)
    problem = checkpoint.tensors["layers.0.mlp.experts.1.down_proj.weight"].problem
    assert re.search(told, problem)


def test_layers_behind_the_last_one_are_left_out(tmp_path):
    save_tiny_experts(tmp_path, "qwen3 with experts")
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.layers.4.mlp.gate.weight": torch.ones(2)}, path)
    config = parse_config(read_json_object(tmp_path / "config.json"))
    checkpoint = SafetensorsCheckpoint([path], weight_map(config))
    parameters = Model(config, torch.float32).parameters()
    with pytest.raises(ModelLoadError, match=r"model.layers.4.mlp.gate.weight has no place in the model"):
        plan_parameters(checkpoint, config, parameters, torch.float32)
    plans = plan_parameters(checkpoint, replace(config, num_left_out_layers=1), parameters, torch.float32)
    assert len(plans) == len(parameters)
