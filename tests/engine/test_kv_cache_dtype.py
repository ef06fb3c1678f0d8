"""K and V in 8 bits, from the option and the checkpoint's scales to every layer's pages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import LoadedEngine, load_engine
from lamella.errors import ConfigError, ModelLoadError
from lamella.native.attention import attention_kernels
from tests.helpers.tiny_gemma import save_tiny_gemma

MEMORY = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=3)
    return path


def with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of the model whose checkpoint has these tensors as well."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **scales}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load(folder: Path, kv_cache_dtype: str, **arguments: str) -> LoadedEngine:
    config = EngineConfig(model=str(folder), kv_cache_dtype=kv_cache_dtype, device="cpu", **MEMORY, **arguments)  # type: ignore[arg-type]
    return load_engine(config)


def layer_scales(loaded: LoadedEngine) -> list[tuple[float, float]]:
    return [(place.params.k_scale, place.params.v_scale) for place in loaded.runner.places]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
def test_pages_take_a_byte_per_element(
    folder: Path, name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lamella.attention.choice"):
        loaded = load(folder, name)
    assert "attention backend: torch" in caplog.text
    reason = "there are no native kernels" if attention_kernels() is None else "KV is torch.float8"
    assert f"not native: {reason}" in caplog.text
    assert {place.cache.keys.dtype for place in loaded.runner.places} == {dtype}
    assert loaded.runner.model.dtype == torch.float32
    wide = load(folder, "auto", attention_backend="torch")
    assert {place.cache.values.dtype for place in wide.runner.places} == {torch.float32}
    for group, wide_group in zip(loaded.layout.groups, wide.layout.groups, strict=True):
        assert 4 * group.page_bytes == wide_group.page_bytes
    assert layer_scales(loaded) == [(1.0, 1.0)] * 3


def test_scales_come_from_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Under the names that llm-compressor, vLLM and ModelOpt write; a layer without any has 1."""
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.5]),
        "model.layers.0.self_attn.v_scale": torch.tensor(0.25, dtype=torch.bfloat16),
        "model.layers.1.self_attn.attn.v_scale": torch.tensor(3.0),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(2.0),
    }
    model = with_scales(folder, tmp_path, scales)
    assert layer_scales(load(model, "fp8")) == [(0.5, 0.25), (2.0, 3.0), (1.0, 1.0)]
    assert layer_scales(load(model, "auto")) == [(1.0, 1.0)] * 3


@pytest.mark.parametrize("scale", [[0.0], [float("nan")], [float("inf")], [1.0, 2.0]])
def test_a_scale_that_is_none_is_refused(folder: Path, tmp_path: Path, scale: list[float]) -> None:
    model = with_scales(folder, tmp_path, {"model.layers.2.self_attn.k_scale": torch.tensor(scale)})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.self_attn\.k_scale is .* one positive, finite number"):
        load(model, "fp8")
    assert layer_scales(load(model, "auto")) == [(1.0, 1.0)] * 3


def test_native_kernels_do_not_take_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'native' cannot be used: .*; 'torch' and 'auto' work"):
        load(folder, "fp8", attention_backend="native")


def test_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4' is not known; choose one of auto, fp8, fp8_e4m3"):
        EngineConfig(model="model", kv_cache_dtype="int4")
