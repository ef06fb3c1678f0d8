"""Each script of examples/ runs as its first lines say, here with a tiny random model, and shows what it is for."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.lora_files import save_lora
from tests.helpers.tiny_gemma import save_tiny_gemma

EXAMPLES = Path(__file__).parents[1] / "examples"
# Those that other tests run: `make demo` is a command of the README, and servers have tests of their own.
RUN_ELSEWHERE = {"demo", "fastapi_server"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    save_tiny_gemma(folder, max_position_embeddings=2048)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name, *arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(text, pattern):
    return [tuple(map(int, found.groups())) for found in re.finditer(pattern, text)]


def test_each_example_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    missing = {path.stem for path in EXAMPLES.glob("*.py")} - tested - RUN_ELSEWHERE
    assert not {name for name in missing if not name.startswith("ray_")}


def test_offline_batch(run, model):
    lines = run("offline_batch", model).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("'The capital of France is' -> ")


def test_chat(run, model):
    out = run("chat", model, stdin="Hello there\nAnd again\n\n")
    (cached_first, _), (cached_second, num_second) = numbers(out, r"\((\d+) of (\d+) prompt tokens were cached\)")
    assert cached_first == 0
    assert num_second > cached_second > 0


def test_embedded_engine(run, model):
    out = run("embedded_engine", model)
    assert re.search(r"step +\d+: first finished", out)
    assert re.search(r"step +\d+: late finished", out)
    assert "step  10: unwanted aborted" in out


def test_structured_extraction(run, model):
    answers = [line.strip() for line in run("structured_extraction", model).splitlines() if line.startswith("  ->")]
    assert len(answers) == 3
    for answer in answers:
        if "cut off" not in answer:
            facts = json.loads(answer.removeprefix("-> "))
            assert set(facts) == {"name", "year", "kind"}
            assert isinstance(facts["year"], int)


def test_speculative_edit(run, model):
    out = run("speculative_edit", model)
    plain, fast = numbers(out, r"speculation: (\d+) tokens in (\d+) steps")
    assert plain[0] == fast[0] == 60
    assert fast[1] <= plain[1] == 60
    assert "the same text:" in out


def test_two_models(run, model, tmp_path):
    save_tiny_gemma(tmp_path, seed=1)
    lines = run("two_models", model, tmp_path).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["model 0", "model 1"]


def test_lora_per_request(run, model, tmp_path):
    for index in range(2):
        save_lora(
            tmp_path / f"adapter{index}",
            save_tiny_gemma(tmp_path / "base"),
            modules=("q_proj", "v_proj"),
            seed=index,
            lora_alpha=400,
        )
    out = run("lora_per_request", model, tmp_path / "adapter0", tmp_path / "adapter1")
    answers = dict(line.split(": ", 1) for line in out.splitlines())
    assert set(answers) == {"the model alone", "adapter0", "adapter1"}
    assert len(set(answers.values())) == 3


def test_saved_prefix(run, model, tmp_path):
    first, second = (run("saved_prefix", model, tmp_path / "prefix") for _ in range(2))
    [(num_saved,)] = numbers(first, r"computed (\d+) tokens and saved them")
    assert numbers(second, r"loaded (\d+) tokens from") == [(num_saved,)]
    assert numbers(second, r"(\d+) of \d+ prompt tokens came from the cache") == [(num_saved,)]
    assert first.splitlines()[2:] == second.splitlines()[2:], "another answer"


def test_retention_policy(run, model):
    found = dict(line.split(": ", 1) for line in run("retention_policy", model, 1_000_000).splitlines())
    assert {name: int(text.split()[0]) for name, text in found.items()} == {
        "none": 0,
        "tails": 0,
        "tails, and a place every 80 tokens": 480,
        "tails, and a hint": 560,
        "all": 0,
    }


@pytest.mark.external
def test_evaluate(run, model):
    assert re.search(r"accuracy: [01]\.\d\d of 3 questions", run("evaluate", model))
