"""`lamella generate` on every row of the table in docs/models.md: what runs gives transformers' tokens, by each way in;
what does not says the reason that the table gives, before it reads a weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner

import lamella
import lamella.cli
from tests.helpers.table_rows import refused, runnable, save_refused, save_runnable
from tests.helpers.transformers_models import logits_of

PROMPT = "the quick brown fox jumps over the lazy dog"
NUM_TOKENS = 6
ARGUMENTS = (
    *("--prompt", PROMPT, "--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--ignore-eos", "--json"),
    *("--kv-cache-memory-bytes", "8388608", "--max-model-len", "128"),
)
# By default one family of its own, one of transformers' alone, one saved inside a multimodal model, and refusals that
# the config gives, that a class is missing for, and that the attention call gives.
RUN_BY_DEFAULT = (("cohere2", "native"), ("granitemoe_swa", "transformers"), ("step3p5", "transformers"))
REFUSED_BY_DEFAULT = ("deepseek_v4", "inkling_text", "lfm3_vl_vision", "dory")


def some(cases, by_default):
    assert set(by_default) <= set(cases)
    return [
        pytest.param(case, id=case if isinstance(case, str) else "-".join(case), marks=marks)
        for case in cases
        for marks in [() if case in by_default else pytest.mark.slow]
    ]


def assert_transformers_tokens(stdout, model, folder):
    (line,) = stdout.splitlines()
    tokens = json.loads(line)["outputs"][0]["token_ids"]
    prompt = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    assert len(tokens) == NUM_TOKENS
    assert tokens == logits_of(model, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("row", some(runnable(), RUN_BY_DEFAULT))
def test_a_row_that_runs_gives_transformers_tokens(row: tuple[str, str], tmp_path: Path) -> None:
    model_type, way = row
    model = save_runnable(tmp_path, model_type)
    arguments = ["generate", "--model", str(tmp_path), "--model-impl", way, *ARGUMENTS]
    result = CliRunner().invoke(lamella.cli.cli, arguments)
    assert result.exit_code == 0, result.output
    assert_transformers_tokens(result.stdout, model, tmp_path)


@pytest.mark.parametrize("model_type", some(list(refused()), REFUSED_BY_DEFAULT))
def test_a_row_that_does_not_run_says_the_tables_reason(model_type: str, tmp_path: Path) -> None:
    save_refused(tmp_path, model_type)
    result = CliRunner().invoke(lamella.cli.cli, ["generate", "--model", str(tmp_path), *ARGUMENTS])
    assert (result.exit_code, result.stdout) == (2, "")
    assert refused()[model_type].refusal in result.stderr
    assert len(result.stderr.splitlines()) == 1


def from_the_shell(folder):
    return subprocess.run(
        [sys.executable, "-m", "lamella", "generate", "--model", str(folder), *ARGUMENTS],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(lamella.__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["exaone4", "granitemoe_swa"])
def test_from_the_shell_the_way_in_is_found(model_type, tmp_path):
    model = save_runnable(tmp_path, model_type)
    result = from_the_shell(tmp_path)
    assert result.returncode == 0, result.stderr
    assert_transformers_tokens(result.stdout, model, tmp_path)


@pytest.mark.slow
def test_from_the_shell_a_refusal_is_its_last_line(tmp_path):
    save_refused(tmp_path, "qwen3_next")
    result = from_the_shell(tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert refused()["qwen3_next"].refusal in result.stderr.splitlines()[-1]
