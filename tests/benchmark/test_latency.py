"""`lamella bench latency` on a stand-in for the engine, whose calls are looked at."""

import json

from click.testing import CliRunner

from lamella import cli as cli_module
from lamella.benchmark.latency import LatencyArgs, run_latency
from lamella.cli import cli
from tests.helpers.fake_llm import FakeLLM


def test_every_batch_is_new_and_only_the_last_ones_count():
    made = []

    def factory(**arguments):
        made.append(FakeLLM(**arguments))
        return made[0]

    args = LatencyArgs(
        engine_args={"model": "m"}, input_len=5, output_len=7, batch_size=3, n=2, num_iters_warmup=2, num_iters=4
    )
    result = run_latency(args, factory)
    (llm,) = made
    assert len(llm.calls) == 6
    prompts = [tuple(prompt) for given, _ in llm.calls for prompt in given]
    assert len(set(prompts)) == len(prompts) == 18
    assert all(len(prompt) == 5 and max(prompt) < 100 for prompt in prompts)
    assert {(one.n, one.max_tokens, one.ignore_eos) for _, params in llm.calls for one in params} == {(2, 7, True)}
    assert len(result.latencies) == 4
    assert min(result.latencies) >= FakeLLM.generate_seconds
    shares = result.percentiles()
    assert min(result.latencies) <= shares[10] <= shares[50] <= shares[99] <= max(result.latencies)


def test_the_command_writes_vllms_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_module, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "generate_seconds", 0.0)
    output = tmp_path / "latency.json"
    flags = ["--batch-size", "1", "--num-iters", "2", "--num-iters-warmup", "0", "--output-json", str(output)]
    result = CliRunner().invoke(cli, ["bench", "latency", "--model", "m", *flags])
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert set(written) == {"avg_latency", "latencies", "percentiles"}
    assert list(written["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result.stdout.startswith(f"Avg latency: {sum(written['latencies']) / 2} seconds")
    refused = CliRunner().invoke(cli, ["bench", "latency", "--model", "m", "--num-iters", "0"])
    assert (refused.exit_code, "--num-iters=0" in refused.stderr) == (2, True)
