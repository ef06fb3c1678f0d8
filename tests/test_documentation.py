"""The commands and Python blocks of README and docs/ are run, with a tiny random model in the place of the demo's.

`lamella` commands run whole. A benchmark takes minutes or a GPU: of its commands the options are parsed by the script
itself. What make, pip and pytest are told to do is looked up: that the targets, extras and paths are there.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import lamella.cli
from lamella import LLM, LoRARequest, SamplingParams
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.sharding import Worker, shard_config
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.weights.shards import cut_weights, parameter_shards
from tests.helpers.lora_files import save_lora
from tests.helpers.sharded_layers import random_tensors
from tests.helpers.tiny_gemma import save_tiny_gemma

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
COMMANDS = ("lamella", "python", "make", "pip", "pytest")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text); what is indented has no language, but where it imports lamella it is Python."""
    text = page.read_text(encoding="utf-8")
    found = FENCED.findall(text)
    for block in INDENTED.findall(FENCED.sub("", text)):
        lines = "\n".join(line[4:] for line in block.splitlines())
        found.append(("python" if lines.startswith(("from lamella", "import lamella")) else "", lines))
    return found


def python_pages() -> list[Path]:
    return [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]


def commands() -> list[str]:
    """Each command, with continued lines joined, and without comments and variables before it."""
    found: dict[str, None] = {}
    for page in PAGES:
        texts = [text for language, text in blocks(page) if language in ("", "bash", "sh", "console")]
        inline = re.findall(r"`(lamella [a-z][^`]*)`", page.read_text(encoding="utf-8"))
        for line in [*"\n".join(texts).replace("\\\n", " ").splitlines(), *(one.replace("\n", " ") for one in inline)]:
            words = re.sub(r"\s#.*", "", line).split()
            while words and ("=" in words[0] or words[0] == "nice"):
                words = words[3:] if words[0] == "nice" else words[1:]
            if words and words[0] in COMMANDS and "..." not in words:
                found[" ".join(words)] = None
    return list(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands name: a model, prompts, adapters."""
    folder = tmp_path_factory.mktemp("documentation")
    model = save_tiny_gemma(folder / "model", max_position_embeddings=4096)
    for name in ("sql", "chat"):
        save_lora(folder / "adapters" / name, model)
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "in.jsonl").write_text('{"custom_id": "a", "prompt": "one", "max_tokens": 2}\n')
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    return place


def names_of(page: Path, place: Path) -> dict[str, Any]:
    """What a page's blocks speak of and do not make themselves."""
    if page.stem == "adapters":
        return {"prompts": ["a", "b"]}
    if page.stem == "models":
        config = parse_config(read_json_object(place / "model" / "config.json"))
        tensors = random_tensors(Model(config, torch.float32))
        return {
            "config": config, "tensors": tensors, "torch": torch, "Model": Model, "Worker": Worker,
            "shard_config": shard_config, "cut_weights": cut_weights, "parameter_shards": parameter_shards,
        }  # fmt: skip
    if page.stem == "prefixes":
        document, question = "a window slides over the tokens " * 20, "and then?"
        llm = LLM(str(place / "model"), max_model_len=4096)
        ids = [5 + number % 50 for number in range(4090)]
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        return {
            "llm": llm, "document": document, "question": question, "ids": ids, "messages": messages,
            "system_prompt": document, "question_ids": [7, 8],
        }  # fmt: skip
    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams, "LoRARequest": LoRARequest}
    return names | {"model": str(place / "model")}


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, here: Path) -> None:
    names = names_of(page, here)
    for number, (_, text) in enumerate(block for block in blocks(page) if block[0] == "python"):
        for model in ("demo:gemma-3-270m", "models/qwen2.5-0.5b"):
            text = text.replace(f'"{model}"', repr(str(here / "model")))
        text = text.replace("818, 5279", "18, 79")  # of a smaller vocabulary
        exec(compile(text, f"{page.name}, block {number}", "exec"), names)
    if page.stem == "prefixes":
        names["llm"].close()


def runnable(prefix: str) -> list[str]:
    return [command for command in commands() if command.split()[0] == prefix]


def whole_commands() -> list[str]:
    """Those of lamella that say all that they need; others only name a command or an option."""
    return [one for one in runnable("lamella") if "--model" in one or "trace.json" in one]


@pytest.mark.parametrize("command", whole_commands())
def test_lamella_commands_run(command: str, here: Path) -> None:
    if "trace-picture" in command:
        with LLM(str(here / "model"), max_model_len=64, profile=str(here / "trace.json")) as llm:
            llm.generate("one", SamplingParams(max_tokens=2), use_tqdm=False)
    words = [str(here / "model") if word == "demo:gemma-3-270m" else word for word in shlex.split(command)[1:]]
    words = ["8" if word in ("64", "128") else word for word in words]  # a benchmark of fewer and shorter requests
    if "--plot" in words and importlib.util.find_spec("matplotlib") is None:  # an extra of its own draws it
        place = words.index("--plot")
        del words[place : place + 2]
    result = CliRunner().invoke(lamella.cli.cli, words, input="")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", runnable("lamella"))
def test_lamella_has_the_commands(command: str) -> None:
    words = shlex.split(command)[1:]
    group: Any = lamella.cli.cli
    while words and isinstance(group, click.Group):
        assert words[0] in group.commands, f"no command {words[0]}"
        group = group.commands[words.pop(0)]


@pytest.mark.parametrize("command", runnable("python"))
def test_scripts_take_the_options(command: str, here: Path) -> None:
    _, script, *words = shlex.split(command)
    if script == "-m":
        assert importlib.util.find_spec(words[0]) is not None
        return
    path = ROOT / script
    source = path.read_text(encoding="utf-8")
    # Words in capitals stand for a path of the reader's.
    words = [str(here / "model") if re.fullmatch("[A-Z_]{3,}", word) else word for word in words]
    has_own_name = not path.with_suffix("").is_dir()
    if "click" in source and path.parent.name == "benchmarks" and has_own_name:
        importlib.import_module(path.stem).main.make_context(path.stem, words)
    else:
        for option in (word for word in words if word.startswith("--")):
            assert option in source, f"{script} has no {option}"


def test_what_make_pip_and_pytest_are_told_is_there() -> None:
    makefile, setup = (ROOT / "Makefile").read_text(), (ROOT / "setup.py").read_text()
    for command in commands():
        words = shlex.split(command)
        if words[0] == "make":
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), command
        elif words[0] == "pip":
            for extra in re.findall(r"\.\[([\w,-]+)\]", command):
                assert all(f'"{name}":' in setup for name in extra.split(",")), command
        elif words[0] == "pytest":
            assert all((ROOT / word).exists() for word in words[1:] if "/" in word), command


def test_commands_and_blocks_are_found() -> None:
    """Or nothing above would be run."""
    assert len(python_pages()) >= 9
    assert len(whole_commands()) >= 4
    assert len(runnable("python")) >= 12
    assert {"make demo", "make test"} <= set(commands())
