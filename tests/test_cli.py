import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import lamella.cli
from lamella import CompletionOutput, EngineConfig, ModelLoadError, SamplingParams
from tests.helpers.fake_llm import FakeLLM


@pytest.fixture
def made(monkeypatch):
    llms = []

    def factory(**arguments):
        llms.append(FakeLLM(**arguments))
        return llms[-1]

    monkeypatch.setattr(lamella.cli, "LLM", factory)
    return llms


def generate(*arguments):
    return CliRunner().invoke(lamella.cli.cli, ["generate", "--model", "some/model", *arguments])


def leaf_commands(command):
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from leaf_commands(child)
    else:
        yield command


def test_prompts_are_completed_in_order(made):
    result = generate("--prompt", "one two", "--prompt", "three", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "Prompt: 'one two'\nCompletion: 'seven seven '\nPrompt: 'three'\nCompletion: 'seven seven '\n"
    )
    assert made[0].is_closed


def test_a_failed_request_says_why(made, monkeypatch):
    def answer(self, index, prompt, params):
        output = answer_of_all(self, index, prompt, params)
        failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason="no token can be chosen")
        return replace(output, outputs=[failed]) if index == 0 else output

    answer_of_all = FakeLLM._answer
    monkeypatch.setattr(FakeLLM, "_answer", answer)
    arguments = ("--prompt", "one two", "--prompt", "three", "--max-tokens", "1")
    assert generate(*arguments).stdout == (
        "Prompt: 'one two'\nCompletion: ''\nError: no token can be chosen\nPrompt: 'three'\nCompletion: 'seven '\n"
    )
    first, _ = map(json.loads, generate(*arguments, "--json").stdout.splitlines())
    assert first["outputs"] == [
        {"text": "", "token_ids": [], "finish_reason": "error", "stop_reason": "no token can be chosen"}
    ]


def test_json_lines(made):
    result = generate("--prompt", "one two", "--prompt", "é", "--max-tokens", "1", "--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {
            "request_id": str(index),
            "prompt": prompt,
            "num_prompt_tokens": num_prompt_tokens,
            "num_cached_tokens": num_cached_tokens,
            "outputs": [{"text": "seven ", "token_ids": [7], "finish_reason": "length", "stop_reason": None}],
        }
        for index, (prompt, num_prompt_tokens, num_cached_tokens) in enumerate([("one two", 2, 0), ("é", 1, 2)])
    ]


def test_prompts_file_follows_the_prompts(made, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first line\n\nsecond line\n")
    generate("--prompt", "given", "--prompts-file", str(path))
    assert made[0].calls[0][0] == ["given", "first line", "second line"]


def test_jsonl_prompts_may_be_token_ids(made, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"text"\n[1, 2]\n')
    assert generate("--prompts-file", str(path)).stdout == (
        f"Prompt: 'text'\nCompletion: {'seven ' * 16!r}\nPrompt: [1, 2]\nCompletion: {'seven ' * 16!r}\n"
    )
    assert made[0].calls[0][0] == ["text", [1, 2]]
    path.write_text("not json\n")
    refused = generate("--prompts-file", str(path))
    assert refused.exit_code == 2
    assert f"{path}, line 1 is not JSON" in refused.stderr


def test_sampling_flags(made):
    result = generate(
        *("--prompt", "x", "--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4"),
        *("--min-p", "0.1", "--stop", "a", "--stop", "b", "--sampling-seed", "3", "--seed", "4", "--ignore-eos"),
    )
    assert result.exit_code == 0, result.output
    assert made[0].calls[0][1] == [
        SamplingParams(
            max_tokens=5, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop=["a", "b"], seed=3, ignore_eos=True
        )
    ]
    assert made[0].config.seed == 4


def test_no_prompt_is_a_usage_error(made):
    result = generate()
    assert result.exit_code == 2
    assert "give --prompt or --prompts-file" in result.stderr
    assert made == []


def test_lamellas_errors_are_one_line(monkeypatch):
    def factory(**_):
        raise ModelLoadError("model='some/model':\n  no such folder")

    monkeypatch.setattr(lamella.cli, "LLM", factory)
    result = generate("--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: --model='some/model': no such folder\n"


def test_other_errors_are_not_hidden(monkeypatch):
    def factory(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(lamella.cli, "LLM", factory)
    assert isinstance(generate("--prompt", "x").exception, ZeroDivisionError)


NO_ENGINE = ("plan", "clear", "models", "trace-picture")
ENGINE_COMMANDS = [command for command in leaf_commands(lamella.cli.cli) if command.name not in NO_ENGINE]


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=lambda command: command.name)
def test_every_engine_argument_is_a_flag_and_no_flag_is_taken_twice(command):
    flags = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    expected = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(EngineConfig)}
    assert expected <= set(flags)
    assert len(flags) == len(set(flags))


def test_version_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "lamella", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(lamella.__file__).parents[1],
        stdin=subprocess.DEVNULL,
    )
    assert (result.returncode, result.stdout) == (0, "lamella, version 0.1.0\n")
