"""The benchmark and the command on a real engine: what they say is what the engine did."""

import json

import pytest
from click.testing import CliRunner

from lamella import LLM, SamplingParams
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.throughput import ThroughputArgs, run_throughput
from lamella.cli import cli
from tests.helpers.tiny_gemma import save_tiny_gemma

ENGINE = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 1}
ENGINE_FLAGS = ["--max-model-len", "128", "--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.mark.parametrize(("is_caching", "num_cached_tokens"), [(True, 4 * 32), (False, 0)])
def test_prefix_repetition_hits_every_use_of_a_prefix_after_its_first(folder, is_caching, num_cached_tokens):
    dataset = DatasetOptions(
        dataset_name="prefix-repetition",
        prefix_repetition_prefix_len=32,
        prefix_repetition_suffix_len=16,
        prefix_repetition_num_prefixes=2,
        prefix_repetition_output_len=5,
    )
    engine_args = {"model": folder, "enable_prefix_caching": is_caching, **ENGINE}
    # One request at a time: 6 prompts, of which the first of each prefix finds nothing.
    result = run_throughput(ThroughputArgs(engine_args=engine_args, dataset=dataset, num_prompts=6))
    assert (result.num_prompt_tokens, result.num_output_tokens) == (6 * 48, 6 * 5)
    assert result.num_cached_tokens == num_cached_tokens
    assert set(result.peak_pages) == {"full", "sliding_16"}
    # 48 + 5 tokens, the last of which is never written, are 4 pages of 16.
    assert result.peak_pages["full"] == 4


def test_generate_prints_what_the_engine_generates(folder):
    prompts = ["the quick brown fox", "a window slides"]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(folder, **ENGINE) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    arguments = ["--prompt", prompts[0], "--prompt", prompts[1], "--max-tokens", "6", "--temperature", "0", "--json"]
    result = CliRunner().invoke(cli, ["generate", "--model", folder, *arguments, *ENGINE_FLAGS])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["outputs"][0]["token_ids"] for line in result.stdout.splitlines()] == expected


def test_lengths_beyond_the_model_are_refused_in_one_line(folder):
    arguments = ["--input-len", "120", "--output-len", "9", "--num-prompts", "1"]
    result = CliRunner().invoke(cli, ["bench", "throughput", "--model", folder, *arguments, *ENGINE_FLAGS])
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: a prompt of 120 tokens with 9 to generate exceeds --max-model-len=128; "
        "ask for shorter lengths, or raise --max-model-len\n"
    )
