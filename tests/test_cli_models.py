"""`lamella models` against the registry and transformers' own."""

import json

from click.testing import CliRunner
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lamella.cli import cli


def rows(*flags):
    result = CliRunner().invoke(cli, ["models", "--json", *flags])
    assert result.exit_code == 0, result.output
    return {row["architecture"]: row for row in map(json.loads, result.stdout.splitlines())}


def test_every_architecture_once_with_who_runs_it():
    found = rows()
    assert found["Gemma3ForCausalLM"] == {
        "architecture": "Gemma3ForCausalLM", "family": "gemma3", "backend": "native", "gguf": "gemma3",
        "status": "supported",
    }  # fmt: skip
    assert found["Gemma3ForConditionalGeneration"]["status"] == "supported, its text model"
    assert (found["GPT2LMHeadModel"]["backend"] if "GPT2LMHeadModel" in found else "transformers") == "transformers"
    assert found["HeliumForCausalLM"]["backend"] == "transformers"
    names = {one for one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(one, str)}
    assert {name for name in names if name.endswith("ForCausalLM")} <= set(found)
    native = rows("--native")
    assert native == {name: row for name, row in found.items() if row["backend"] == "native"}
    assert len(native) > 25


def test_the_table_has_a_line_for_each():
    result = CliRunner().invoke(cli, ["models", "--native"])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["architecture", "backend", "gguf", "status"]
    assert [line.split()[0] for line in lines[1:]] == list(rows("--native"))
