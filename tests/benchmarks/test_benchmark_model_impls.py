"""The ways to run a model beside each other: each says how many tokens of the first way's it gave, which is all of them
where they ran the same model."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import benchmark_model_impls
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

SIZES = ["--requests", "1", "--requests", "3", "--input-tokens", "20", "--output-tokens", "6", "--rounds", "2"]


@pytest.fixture
def model(tmp_path):
    num_threads = torch.get_num_threads()
    sizes = {"num_hidden_layers": 6, "sliding_window_pattern": 6, "head_dim": 256, "query_pre_attn_scalar": 256}
    save_tiny_gguf(tmp_path / "m.gguf", save_tiny_gemma(tmp_path / "folder", **sizes), quantise="Q8_0")
    yield str(tmp_path / "m.gguf")
    torch.set_num_threads(num_threads)  # the benchmark has set it for the process


@pytest.mark.slow  # four models are loaded
def test_every_way_gives_the_same_tokens_and_is_told_in_its_row(model):
    result = CliRunner().invoke(benchmark_model_impls.main, ["--model", model, *SIZES])
    assert result.exit_code == 0, result.output
    rows = [line.strip("| ").split(" | ") for line in result.output.splitlines() if line.startswith("|")][2:]
    ways = list(benchmark_model_impls.WAYS.values())
    assert [row[:2] for row in rows] == [[count, way] for count in ("1", "3") for way in ways]
    assert [row[-1] for row in rows] == ["1.00"] * 8


def test_a_way_that_is_not_known_is_named(model):
    result = CliRunner().invoke(benchmark_model_impls.main, ["--model", model, "--ways", "native,fast"])
    assert result.exit_code == 1
    assert "'fast' is not known; choose of native, blocks, transformers, generate" in result.output
