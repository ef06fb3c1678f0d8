import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import lamella.cli
from lamella import CompletionOutput
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.throughput import ThroughputArgs, run_throughput
from lamella.errors import ConfigError
from tests.helpers.fake_llm import FakeLLM

JSON_KEYS = {
    "model_id",
    "elapsed_time",
    "num_requests",
    "total_num_tokens",
    "requests_per_second",
    "tokens_per_second",
    "output_tokens_per_second",
    "num_prompt_tokens",
    "num_output_tokens",
    "load_seconds",
    "peak_memory_bytes",
    "prefix_hit_share",
    "peak_pages",
}


@pytest.fixture
def made(monkeypatch):
    """The LLMs that the command made, all fake."""
    llms = []

    def factory(**arguments):
        llms.append(FakeLLM(**arguments))
        return llms[-1]

    monkeypatch.setattr(lamella.cli, "LLM", factory)
    return llms


def bench(*arguments):
    return CliRunner().invoke(lamella.cli.cli, ["bench", "throughput", "--model", "some/model", *arguments])


def small(**arguments):
    dataset = DatasetOptions(random_input_len=6, random_output_len=3)
    return ThroughputArgs(**{"engine_args": {"model": "some/model"}, "dataset": dataset, "num_prompts": 5} | arguments)


class TestReport:
    def test_first_lines_are_vllms(self, made):
        result = bench("--random-input-len", "6", "--random-output-len", "3", "--num-prompts", "5")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        throughput = r"Throughput: \d+\.\d\d requests/s, \d+\.\d\d total tokens/s, \d+\.\d\d output tokens/s"
        assert re.fullmatch(throughput, lines[0])
        assert lines[1:3] == ["Total num prompt tokens:  30", "Total num output tokens:  15"]

    def test_the_other_lines(self, made):
        lines = bench("--input-len", "6", "--output-len", "3", "--num-prompts", "5").stdout.splitlines()[3:]
        figures = {name: figure.strip() for name, figure in (line.split(":") for line in lines)}
        assert figures["Time to load"] == "1.25 s"
        assert figures["Prefix-hit share"] == "26.7 %"  # 4 prompts * 2 cached of 30 tokens
        assert figures["Peak pages per group"] == "full 12, window_512 3"
        assert re.fullmatch(r"\d+ MiB", figures["Peak memory"])
        assert "Skipped requests" not in figures

    def test_rates_agree_with_counts_and_time(self):
        measured = run_throughput(small(), FakeLLM).to_json()
        seconds = measured["elapsed_time"]
        assert measured["requests_per_second"] * seconds == pytest.approx(5)
        assert measured["tokens_per_second"] * seconds == pytest.approx(45)
        assert measured["output_tokens_per_second"] * seconds == pytest.approx(15)

    def test_json_has_vllms_keys_and_ours(self, made, tmp_path):
        path = tmp_path / "result.json"
        result = bench("--input-len", "6", "--output-len", "3", "--num-prompts", "5", "--output-json", str(path))
        assert result.exit_code == 0, result.output
        measured = json.loads(path.read_text())
        assert set(measured) == JSON_KEYS
        assert measured["model_id"] == "some/model"
        assert (measured["num_requests"], measured["total_num_tokens"]) == (5, 45)
        assert (measured["num_prompt_tokens"], measured["num_output_tokens"]) == (30, 15)
        assert measured["load_seconds"] == 1.25
        assert measured["prefix_hit_share"] == pytest.approx(8 / 30)
        assert measured["peak_pages"] == {"full": 12, "window_512": 3}

    def test_peak_memory_is_the_processs_in_bytes(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        measured = run_throughput(small(), FakeLLM).peak_memory_bytes
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        assert before <= measured <= after

    def test_skipped_requests_are_reported(self, made, tmp_path):
        path = tmp_path / "azure.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nt,4,5\nt,90,11\nt,6,7\n")
        result = bench("--dataset-name", "trace", "--dataset-path", str(path), "--max-model-len", "100")
        assert "Total num prompt tokens:  10" in result.stdout
        assert "Skipped requests:         1 (longer than max_model_len)" in result.stdout


class TestWhatIsSent:
    def test_every_request_generates_its_full_length(self, made):
        bench("--input-len", "6", "--output-len", "3", "--num-prompts", "5")
        [(prompts, params)] = made[0].calls
        assert [len(prompt) for prompt in prompts] == [6] * 5
        assert {(p.max_tokens, p.ignore_eos, p.temperature) for p in params} == {(3, True, 1.0)}

    def test_temperature_flag(self, made):
        bench("--input-len", "6", "--num-prompts", "2", "--temperature", "0")
        assert [p.temperature for p in made[0].calls[0][1]] == [0.0, 0.0]

    def test_seed_reaches_engine_and_prompts(self, made):
        for seed in ("5", "5", "6"):
            bench("--input-len", "6", "--num-prompts", "3", "--seed", seed)
        first, same, other = (llm.calls[0][0] for llm in made)
        assert [llm.config.seed for llm in made] == [5, 5, 6]
        assert first == same
        assert first != other

    def test_warmup_is_not_measured_and_sends_no_prompt_of_the_run(self, monkeypatch):
        monkeypatch.setattr(FakeLLM, "generate_seconds", 2.0)  # more than a busy machine delays anything
        llms = []

        def factory(**arguments):
            llms.append(FakeLLM(**arguments))
            return llms[-1]

        result = run_throughput(small(num_warmups=3), factory)
        (warmup, _), (prompts, _) = llms[0].calls
        assert [len(prompt) for prompt in warmup] == [6] * 3
        assert not any(prompt in prompts for prompt in warmup)
        assert (result.num_requests, result.num_prompt_tokens) == (5, 30)
        assert FakeLLM.generate_seconds <= result.elapsed_seconds < 2 * FakeLLM.generate_seconds

    def test_engine_flags_are_passed_on_and_others_left_to_the_engine(self, made):
        result = bench(
            *("--input-len", "6", "--num-prompts", "2", "--max-num-seqs", "7", "--kv-cache-memory-bytes", "2GiB"),
            *("--no-enable-prefix-caching", "--page_size", "32"),
        )
        assert result.exit_code == 0, result.output
        config = made[0].config
        assert (config.max_num_seqs, config.kv_cache_memory_bytes, config.page_size) == (7, 2 * 1024**3, 32)
        assert config.enable_prefix_caching is False
        assert config.max_num_batched_tokens == 2048

    def test_the_underscored_data_set_name_works(self, made):
        result = bench("--dataset-name", "prefix_repetition", "--input-len", "8", "--num-prompts", "20")
        assert result.exit_code == 0, result.output
        prefixes = {tuple(prompt[:4]) for prompt in made[0].calls[0][0]}
        assert len(prefixes) == 10

    def test_a_request_that_failed_is_an_error_and_not_a_figure(self, made, monkeypatch):
        failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason="no token can be chosen")
        answer = FakeLLM._answer
        monkeypatch.setattr(
            FakeLLM, "_answer", lambda self, index, *rest: replace(answer(self, index, *rest), outputs=[failed])
        )
        result = bench("--input-len", "6", "--num-prompts", "2")
        assert result.exit_code == 2
        assert "request 0 failed, so the time is of no use: no token can be chosen" in result.stderr
        assert result.stdout == ""

    def test_the_engine_is_closed(self, made):
        bench("--input-len", "6", "--num-prompts", "2")
        assert made[0].is_closed


class TestRefusals:
    def test_contradictions_are_one_line_and_load_nothing(self, made):
        result = bench("--input-len", "5", "--random-input-len", "6")
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr == "Error: --input-len 5 contradicts --random-input-len 6; give one of the two\n"
        assert made == []

    def test_an_engine_argument_error_is_one_line(self, made):
        result = bench("--page-size", "0")
        assert result.exit_code == 2
        assert result.stderr == "Error: --page-size=0 is out of range; give a whole number from 1 to 65536\n"

    def test_unwritable_result_is_found_out_before_the_run(self, made, tmp_path):
        result = bench("--output-json", str(tmp_path / "absent" / "result.json"))
        assert result.exit_code == 2
        assert "its folder does not exist" in result.stderr
        assert made == []

    @pytest.mark.parametrize(("name", "value"), [("num_prompts", 0), ("num_warmups", -1)])
    def test_counts(self, name, value):
        with pytest.raises(ConfigError, match=f"{name}={value} is out of range; give a whole number from "):
            small(**{name: value})


def test_the_script_is_the_same_command():
    script = Path(__file__).parents[2] / "benchmarks" / "benchmark_throughput.py"
    result = subprocess.run(
        [sys.executable, str(script), "--model", "x", "--input-len", "5", "--random-input-len", "6"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(script.parents[1])},
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 2
    assert result.stderr == "Error: --input-len 5 contradicts --random-input-len 6; give one of the two\n"
