"""The choice of the triton backend, and a whole engine on it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import LLM, LoRARequest, SamplingParams
from lamella.attention.choice import choose_backend
from lamella.attention.triton.tuning import choose_tile
from lamella.errors import ConfigError
from lamella.kv_cache.spec import FullAttentionSpec
from tests.helpers.lora_files import save_lora
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.triton_cases import DEVICE

SCALES = [(0, "k", 8.0), (0, "v", 0.001), (2, "k", 0.05), (2, "v", 4.0)]


def generate(folder: Path, prompts: list[list[int]], max_tokens: list[int], **arguments: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
    defaults = {"max_model_len": 128, "kv_cache_memory_bytes": 2**21, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    arguments = defaults | arguments
    with LLM(str(folder), check_invariants=True, dtype="float32", **arguments) as llm:
        assert llm.engine.attention_backend == arguments["attention_backend"]
        fused = llm.engine.inspect().runner.model.operators.name == "triton"
        assert fused == (arguments["attention_backend"] == "triton")
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_an_engines_greedy_tokens_are_the_references(tmp_path: Path) -> None:
    """Chunks of long prompts beside decodes: prompts that share a start, in two sliding layers (window 16) and a full
    one."""
    save_tiny_gemma(tmp_path, num_hidden_layers=3)
    generator = np.random.default_rng(5)
    prompts = [generator.integers(6, 320, size=size).tolist() for size in (3, 34, 12)]
    prompts.append([*prompts[1][:30], 7, 8, 9])
    max_tokens = [4, 2, 3, 2]
    expected = generate(tmp_path, prompts, max_tokens, attention_backend="reference", device="cpu")
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert generate(tmp_path, prompts, max_tokens, attention_backend="triton", device=DEVICE.type) == expected


@pytest.mark.slow
def test_adapters_on_the_fused_path(tmp_path: Path) -> None:
    """Two in one batch beside a request of none, with prompts in chunks."""
    (tmp_path / "model").mkdir()
    model = save_tiny_gemma(tmp_path / "model", num_hidden_layers=3)
    requests: list[LoRARequest | None] = [None]
    for index, modules in enumerate((("q_proj", "v_proj", "down_proj"), ("k_proj", "o_proj", "gate_proj", "up_proj"))):
        save_lora(tmp_path / f"{index}", model, seed=index, spread=0.3, modules=modules)
        requests.append(LoRARequest(f"{index}", index + 1, tmp_path / f"{index}"))
    prompts = [np.random.default_rng(size).integers(6, 320, size=size).tolist() for size in (12, 34, 20)]
    found = []
    for name, device, given in (
        ("native", "cpu", requests),
        ("triton", DEVICE.type, requests),
        ("native", "cpu", [None] * 3),
    ):
        arguments = {"max_model_len": 128, "kv_cache_memory_bytes": 2**21, "max_num_batched_tokens": 24}
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        with LLM(
            str(tmp_path / "model"), enable_lora=True, dtype="float32", max_num_seqs=4, attention_backend=name,
            device=device, **arguments,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, lora_request=given, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert [one == other for one, other in zip(found[0], found[2], strict=True)] == [True, False, False]


@pytest.mark.slow
def test_with_kv_in_eight_bits_as_well(tmp_path: Path) -> None:
    """With scales from the checkpoint, one so small that most of V is too large and tokens show it."""
    save_tiny_gemma(tmp_path, num_hidden_layers=3)
    scales = {f"model.layers.{i}.self_attn.{kv}_scale": torch.tensor(value) for i, kv, value in SCALES}
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, **scales}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = [np.random.default_rng(6).integers(6, 320, size=size).tolist() for size in (3, 20)]
    runs = [
        generate(tmp_path, prompts, [3, 4], attention_backend=name, device=device, kv_cache_dtype=kv_cache_dtype)
        for name, device, kv_cache_dtype in (
            ("reference", "cpu", "fp8"),
            ("triton", DEVICE.type, "fp8"),
            ("reference", "cpu", "auto"),
        )
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_auto_takes_triton_on_cuda_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lamella.attention.choice"):
        assert choose_backend("auto", torch.device("cuda")).name == "triton"
        assert choose_backend("auto", torch.device("cpu")).name != "triton"
    assert "attention backend: triton (asked for 'auto' on cuda; for cuda)" in caplog.text


def test_what_the_kernels_cannot_do_goes_to_torch_or_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    wide = FullAttentionSpec(num_kv_heads=1, k_dim=576, v_dim=512, itemsize_bytes=2)
    with caplog.at_level(logging.INFO, logger="lamella.attention.choice"):
        assert choose_backend("auto", cuda, specs=[wide]).name == "torch"
    assert "at most 512 dimensions, not 576" in caplog.text
    with pytest.raises(ConfigError, match="at most 512 dimensions, not 576"):
        choose_backend("triton", cuda, specs=[wide])
    with pytest.raises(ConfigError, match="CUDA and ROCm devices, not on mps"):
        choose_backend("triton", torch.device("mps"))


def test_without_interpreter_triton_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1 before Python starts"):
        choose_backend("triton", torch.device("cpu"))


def test_without_triton_cuda_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert choose_backend("auto", torch.device("cuda")).name == "torch"
    with pytest.raises(ConfigError, match="triton cannot be imported"):
        choose_backend("triton", torch.device("cuda"))


def test_importing_lamella_does_not_import_triton() -> None:
    code = "import sys, lamella, lamella.attention.choice; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ.copy(), timeout=120).returncode == 0


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "sm_86", "default"])
def test_every_width_has_a_tile(kernel: str, arch: str) -> None:
    for head_dim in range(8, 513, 8):
        for itemsize_bytes in (1, 2, 4):
            tile = choose_tile(kernel, arch, head_dim=head_dim, itemsize_bytes=itemsize_bytes)
            assert 256 % tile.block_n == 0  # decode's segments are whole tiles
    with pytest.raises(ConfigError, match=r"head dimension 513 has no .* tile"):
        choose_tile(kernel, arch, head_dim=513, itemsize_bytes=2)
