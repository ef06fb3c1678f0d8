"""Checkpoints with a `quantization_config`: those that transformers can turn into floats give the tokens of a model
with those floats, and the others are refused in a sentence that names the field, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import LLM, SamplingParams
from lamella.errors import ModelLoadError
from tests.helpers.transformers_models import logits_of, save_random_model

PROMPT = list(range(6, 40))
BLOCK = 32  # rows and columns that share a scale


def edit_config(folder: Path, quantization_config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization_config}))


def replace_tensors(folder: Path, new: dict[str, torch.Tensor], old: list[str]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in old}
    save_file(tensors | new, path, metadata={"format": "pt"})


def in_mxfp4(folder: Path, model: Any) -> None:
    """Experts as blocks of 4 bits with a scale, in the file; as the floats that those are, in `model`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    new, old = {}, []
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, columns, rows = weight.shape
            shape = (num_experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
            weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            new |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            old.append(name)
    assert old
    replace_tensors(folder, new, old)
    edit_config(folder, {"quant_method": "mxfp4"})


def in_fp8(folder: Path, model: Any) -> None:
    """Projections of text layers as 8-bit floats with a scale for each square of BLOCK x BLOCK."""
    new = {}
    parameters = dict(model.named_parameters())
    for name in load_file(folder / "model.safetensors"):
        if not name.endswith("_proj.weight") or "vision" in name:
            continue
        weight = parameters[name.replace("language_model.model.", "model.language_model.")]
        rows, columns = weight.shape
        squares = weight.data.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = squares.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        wide = scales[:, None, :, None]
        stored = (squares / wide).to(torch.float8_e4m3fn)
        weight.data.copy_((stored.float() * wide).view(rows, columns))
        new |= {name: stored.view(rows, columns), f"{name}_scale_inv": scales}
    assert new
    replace_tensors(folder, new, [])
    edit_config(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"})


def run(folder: Path, **arguments: Any) -> Any:
    settings = {"kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "model_impl": "transformers"}
    with LLM(str(folder), **{**settings, **arguments}) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output.outputs[0]


def assert_runs_as(model: Any, folder: Path) -> None:
    given = run(folder)
    tokens = list(given.token_ids)
    expected = torch.log_softmax(logits_of(model, PROMPT + tokens[:-1])[len(PROMPT) - 1 :], dim=-1)
    assert tokens == expected.argmax(dim=-1).tolist()
    logprobs = torch.tensor([row[token].logprob for row, token in zip(given.logprobs, tokens, strict=True)])
    assert (logprobs - expected[range(len(tokens)), tokens]).abs().max() < 1e-4


def test_experts_in_mxfp4(tmp_path):
    model = save_random_model(tmp_path, "gpt_oss")
    in_mxfp4(tmp_path, model)
    assert_runs_as(model, tmp_path)


def test_native_layers_name_the_field_and_who_reads_it(tmp_path):
    model = save_random_model(tmp_path, "olmo2")
    in_fp8(tmp_path, model)
    message = (
        r"config\.json: quantization_config has quant_method='fp8'.*model_impl=\"transformers\".*F8_E4M3 is not read"
    )
    with pytest.raises(ModelLoadError, match=message):
        run(tmp_path, model_impl="auto")


@pytest.mark.parametrize("name", ["olmo2", "gemma3"])
def test_projections_in_fp8(name, tmp_path, monkeypatch):
    """transformers asks for accelerate before it reads them, and then does without. A multimodal checkpoint has the
    field for all of it, and the text model is built from a config of its own."""
    from transformers.quantizers import quantizer_finegrained_fp8

    model = save_random_model(tmp_path, name)
    in_fp8(tmp_path, model)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    assert_runs_as(model, tmp_path)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"quantization_config has quant_method='fp8'.* requires accelerate"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            "quant_method='awq', which transformers cannot read here",
        ),
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq', which transformers cannot read here"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method='bitsandbytes', which .* cannot read here",
        ),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors', which .* cannot read here"),
        ({"quant_method": "mine"}, "quant_method='mine', which transformers does not know"),
        ({"bits": 4}, "quant_method=None, which transformers cannot read here"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_with_the_field(given, reason, tmp_path):
    """The weights are those of a plain model, so that whoever passed over the field would run it."""
    save_random_model(tmp_path, "olmo2")
    edit_config(tmp_path, given)
    with pytest.raises(ModelLoadError, match=f"quantization_config has {reason}"):
        run(tmp_path)
