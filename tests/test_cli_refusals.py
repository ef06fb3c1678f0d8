"""What the command line says of input that it cannot use: the flag as typed, the file and the line."""

from __future__ import annotations

import dataclasses
import re

import click
import pytest
from click.testing import CliRunner

import lamella.cli
from lamella import LLM, EngineConfig, RequestError, SamplingParams
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.cli_options import with_flags
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.tiny_gemma import save_tiny_gemma


@pytest.fixture(autouse=True)
def made(monkeypatch):
    llms = []

    def factory(**arguments):
        llms.append(FakeLLM(**arguments))
        return llms[-1]

    monkeypatch.setattr(lamella.cli, "LLM", factory)
    return llms


def run(*arguments):
    return CliRunner().invoke(lamella.cli.cli, list(arguments))


def refused(*arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def generate(*arguments):
    return refused("generate", "--model", "some/model", *arguments)


def throughput(*arguments):
    return refused("bench", "throughput", "--model", "some/model", *arguments)


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b'"a"\n\n[1, 2\n', 3, "is not JSON"),
        (b'"a"\n5\n', 2, "5 is no prompt"),
        (b'"a"\n\n\nNaN\n', 4, "nan is no prompt"),
        (b'"a"\r\n"b"\r\n"\xff"\r\n', 3, "is no UTF-8 text"),
        (b"[" * 100_000, 1, "is not JSON"),
        (b'"a"\n' + b"9" * 5000, 2, "is not JSON"),
    ],
)
def test_a_row_of_a_jsonl_file_is_named(tmp_path, made, content, line, problem):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    message = generate("--prompts-file", str(path))
    assert message.startswith(f"Error: {path}, line {line}")
    assert problem in message
    assert made == []


def test_a_row_of_a_text_file_is_named(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("fine\nschön\n".encode("latin-1"))
    assert generate("--prompts-file", str(path)).startswith(f"Error: {path}, line 2 is no UTF-8 text")


def test_lines_end_with_line_feeds_and_nothing_else(tmp_path, made):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\x0ctwo\u2028three\x85four\r\n\r\nfive".encode())
    assert run("generate", "--model", "m", "--prompts-file", str(path)).exit_code == 0
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_bytes('"one\u2028two"\n{"prompt": "three"}'.encode())
    run("generate", "--model", "m", "--prompts-file", str(jsonl), "--prompt", "first")
    given = [llm.calls[0][0] for llm in made]
    assert given == [["one\x0ctwo\u2028three\x85four", "five"], ["first", "one\u2028two", {"prompt": "three"}]]


def test_a_prompt_that_the_model_refuses_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save_tiny_gemma(folder)
    monkeypatch.setattr(lamella.cli, "LLM", LLM)
    path = tmp_path / "prompts.jsonl"
    path.write_text('"the cat"\n\n[3, 4]\n{"prompt_token_ids": [3, 99999]}\n')
    arguments = ("generate", "--model", str(folder), "--prompts-file", str(path), "--kv-cache-memory-bytes", "4MiB")
    assert refused(*arguments).startswith(f"Error: {path}, line 4: prompt token 1 is 99999: must lie in [0, ")
    too_long = refused(*arguments, "--prompt", "a", "--prompt", "the " * 600)
    assert too_long.startswith("Error: --prompt number 2: prompt has ")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"input_length": 5, "output_length": 1, "hash_ids": []}\n\n{"input_length": 5}\n', 3),
        ('{"input_length": -5, "output_length": 1, "hash_ids": []}\n', 1),
        ('{"input_length": 1e999, "output_length": 1, "hash_ids": []}\n', 1),
        ('{"input_length": true, "output_length": 1, "hash_ids": []}\n', 1),
        ('{"input_length": 5, "output_length": 9999999999999999999999, "hash_ids": []}\n', 1),
        ('{"input_length": 5, "output_length": 1, "hash_ids": [9223372036854775808]}\n', 1),
        ('{"input_length": 5, "output_length": 1, "hash_ids": 3}\n', 1),
        ("\n[]\n", 2),
        ("\n\n{\n", 3),
    ],
)
def test_a_row_of_a_mooncake_trace_is_named(tmp_path, content, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    message = throughput("--dataset-name", "trace", "--dataset-path", str(path))
    assert message.startswith(f"Error: {path}, line {line}")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"ContextTokens,GeneratedTokens\n5,6\n\n7,x\n", 4),
        (b"ContextTokens,GeneratedTokens\n5,6\n7\n", 3),
        (b"ContextTokens,GeneratedTokens\n-5,6\n", 2),
        (b"ContextTokens,GeneratedTokens\n5,99999999999999999999999\n", 2),
        (b"ContextTokens,GeneratedTokens\n5,\xff\n", 2),
        (b"a,b\n5,6\n", 2),
    ],
)
def test_a_row_of_an_azure_trace_is_named(tmp_path, content, line):
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    message = throughput("--dataset-name", "trace", "--dataset-path", str(path))
    assert message.startswith(f"Error: {path}, line {line}")


def test_a_cut_gzip_file_is_named(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00 no gzip")
    assert throughput("--dataset-name", "trace", "--dataset-path", str(path)).startswith(f"Error: {path}, line 1")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[\n  {"conversations": []},\n  {"conversations": 5}\n]', 3),
        ('[\n  {"conversations": []},\n\n  7\n]', 4),
        (
            '[{"conversations": [{"value": "a"}, {"value": "b"}]},\n {"conversations": [{"value": "a"}, {"text": 1}]}]',
            2,
        ),
        ('[\n\n{"conversations": [}]', 3),
        ('{"conversations": []}', 1),
    ],
)
def test_a_chat_of_a_sharegpt_file_is_named(tmp_path, content, line):
    path = tmp_path / "chats.json"
    path.write_text(content)
    message = throughput("--dataset-name", "sharegpt", "--dataset-path", str(path))
    assert message.startswith(f"Error: {path}, line {line} is no ShareGPT")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--sampling-seed", "-5"], "--sampling-seed=-5 is out of range"),
        (["--seed", "-5"], "--seed=-5 is out of range"),
        (["--top-k", str(2**63)], "--top-k=9223372036854775808 is out of range"),
        (["--max-tokens", "0"], "--max-tokens=0 is out of range"),
        (["--n", "2", "--temperature", "0"], "--n=2 with --temperature=0 would give 2 equal"),
        (["--stop", "a", "--no-detokenize"], "--stop=['a'] is searched in the text, which --no-detokenize never makes"),
        (["--page-size", "0"], "--page-size=0 is out of range"),
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "--max-num-batched-tokens=8 is below --max-num-seqs=9",
        ),
        (["--device", "gpu"], "--device='gpu' is not supported"),
        (["--kv-cache-memory-bytes", "9" * 15 + "TiB"], "--kv-cache-memory-bytes=1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization=1.5 is out of range"),
    ],
)
def test_generate_names_flags_as_they_are_typed(arguments, start):
    assert generate("--prompt", "x", *arguments).startswith(f"Error: {start}")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--num-prompts", "0"], "--num-prompts=0 is out of range"),
        (["--num-prompts", str(10**12)], "--num-prompts=1000000000000 is out of range"),
        (["--num-warmups", "-1"], "--num-warmups=-1 is out of range"),
        (["--temperature", "3"], "--temperature=3.0 is out of range"),
        (["--random-input-len", "0"], "--random-input-len=0 is out of range"),
        (["--input-len", str(2**31)], "--input-len=2147483648 is out of range"),
        (["--random-range-ratio", "1"], "--random-range-ratio=1.0 is out of range; give a number in [0, 1)"),
        (["--dataset-name", "prefix-repetition", "--prefix-repetition-num-prefixes", "0"],
         "--prefix-repetition-num-prefixes=0 is out of range"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--trace-scale", "1e300"], "--trace-scale=1e+300 is out"),
        (["--output-json", "/no/such/folder/x.json"], "--output-json='/no/such/folder/x.json': its folder"),
        (["--output-json", "/"], "--output-json='/' cannot be written"),
        (["--seed", "-1"], "--seed=-1 is out of range"),
    ],
)  # fmt: skip
def test_throughput_names_flags_as_they_are_typed(arguments, start):
    assert throughput(*arguments).startswith(f"Error: {start}")


@pytest.mark.parametrize(
    "arguments",
    [["--random-input-len", str(2**31 - 1)], ["--random-prefix-len", str(2**31 - 1)],
     ["--dataset-name", "prefix-repetition", "--prefix-repetition-prefix-len", str(2**31 - 1)]],
)  # fmt: skip
def test_lengths_beyond_the_model_are_refused_before_so_many_tokens_are_drawn(arguments):
    assert re.search(
        r"a prompt of \d+ tokens with \d+ to generate exceeds --max-model-len=4096", throughput(*arguments)
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_numbers_that_are_none_are_usage_errors(value):
    result = run("generate", "--model", "m", "--prompt", "x", "--temperature", value)
    assert result.exit_code == 2
    assert f"'{value}' is not a number" in result.stderr


def test_a_flag_that_is_mistyped_suggests_the_right_one():
    result = run("generate", "--model", "m", "--prompt", "x", "--max-token", "5")
    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr


@pytest.mark.parametrize(("given", "nearest"), [(["generat"], "generate"), (["bench", "throughputs"], "throughput")])
def test_a_command_that_is_mistyped_suggests_the_right_one(monkeypatch, given, nearest):
    result = run(*given, "--model", "m")
    assert result.exit_code == 2
    assert f"'{nearest}'" in result.stderr

    def as_older_versions_do(self, ctx, args):
        raise click.UsageError(f"No such command '{args[0]}'.")

    monkeypatch.setattr(click.Group, "resolve_command", as_older_versions_do)
    monkeypatch.setattr(lamella.cli.cli, "resolve_command", lamella.cli.cli.resolve_command)
    assert "did you mean 'generate'?" in run("generat", "--model", "m").stderr


def test_names_become_flags_only_where_they_are_names():
    flags = {"seed": "--sampling-seed", "max_tokens": "--max-tokens", "detokenize": "--detokenize"}
    assert with_flags("seed=5 and a seed of max_tokens", flags) == "--sampling-seed=5 and a seed of --max-tokens"
    assert with_flags("max_tokens_of, my-seed=3", flags) == "max_tokens_of, my-seed=3"
    assert with_flags("set detokenize=True or detokenize=False", flags) == "set --detokenize or --no-detokenize"
    assert with_flags("anything", {}) == "anything"


def headings(text):
    return re.findall(r"^(\S.*):$", text, re.M)


def test_help_of_generate_is_in_groups():
    text = run("generate", "--help").output
    assert headings(text) == [
        "Prompts and output",
        "Adapters",
        "How long the output is, and how it ends",
        "How tokens are chosen",
        "What the output holds",
        "The model",
        "Memory and how much runs at once",
        "Reuse of what prompts have in common",
        "How sliding and full layers share memory",
        "Speed and checks",
        "A view inside",
        "Several processes",
        "Other options",
    ]
    sections = dict(zip(headings(text), re.split(r"^\S.*:$", text, flags=re.M)[1:], strict=True))
    assert "--temperature" in sections["How tokens are chosen"]
    assert "--kv-cache-memory-bytes" in sections["Memory and how much runs at once"]
    assert re.findall(r"^  (--?[\w-]+)", sections["Other options"], re.M) == ["-h"]


@pytest.mark.parametrize("command", ["generate", "throughput", "latency", "chat"])
def test_every_flag_has_help_in_plain_words(command):
    """Some, and with no name that only Python knows."""
    commands = lamella.cli.cli.commands
    found = commands["bench"].commands.get(command) or commands[command]
    for parameter in found.params:
        assert isinstance(parameter, click.Option)
        assert parameter.help, parameter.name
        assert "None" not in parameter.help, parameter.name
        fields = {field.name for type_ in (EngineConfig, SamplingParams) for field in dataclasses.fields(type_)}
        named = {word for word in re.findall(r"\w+_\w+", parameter.help) if word in fields}
        assert named == set(), parameter.name


def test_every_field_is_in_a_group():
    grouped = [name for names in lamella.cli.ENGINE_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(EngineConfig.__dataclass_fields__)
    grouped = [name for names in lamella.cli.SAMPLING_GROUPS.values() for name in names]
    assert sorted([*grouped, "output_kind", "logits_processors"]) == sorted(SamplingParams.__dataclass_fields__)


def test_help_gives_the_commands_own_default():
    text = " ".join(run("generate", "--help").output.split())
    assert re.search(r"--scheduling-policy TEXT .{0,200}\[default: prefix\]", text)


def test_data_set_options_check_their_own_ranges():
    for name in DatasetOptions.__dataclass_fields__:
        if name in ("dataset_name", "dataset_path"):
            continue
        for value in (-1, 10**400, float("nan"), "5", True):
            with pytest.raises(lamella.ConfigError, match=f"^{name}="):
                DatasetOptions(**{name: value})


def test_places_are_kept_for_refusals_of_whatever_kind(tmp_path, monkeypatch):
    def refuse(self, prompts, params, use_tqdm=True, lora_request=None):
        raise RequestError("prompts[1]: too odd")

    monkeypatch.setattr(FakeLLM, "generate", refuse)
    path = tmp_path / "prompts.txt"
    path.write_text("\n\nodd\n")
    assert generate("--prompt", "x", "--prompts-file", str(path)) == f"Error: {path}, line 3: too odd\n"
