"""`lamella cache` shows and clears what is lamella's, and nothing else."""

from __future__ import annotations

import os
import time

import pytest
import torch
from click.testing import CliRunner

from lamella.cli import cli
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma

DAY = 86400


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return path, {name: save_tiny_gemma(path / name) for name in ("first", "second")}


@pytest.fixture
def cache_dir(models, tmp_path, monkeypatch):
    """Two models' weights, the first's in two dtypes and three days old, an unfinished file, and things of others."""
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    cache_dir = tmp_path / "cache"
    for name, dtype in (("first", torch.float32), ("first", torch.bfloat16), ("second", torch.float32)):
        source = resolve_model(str(models[0] / name))
        load_weights(source, Model(load_config(source), dtype), cache_dir=cache_dir)
        for path in cache_dir.rglob("*.safetensors"):
            if name == "first":
                os.utime(path, (time.time() - 3 * DAY,) * 2)
    folder = next(cache_dir.iterdir())
    (folder / ".weights-float32-rows-0-x.part").write_bytes(bytes(1000))
    (folder / "notes.txt").write_text("mine")
    (cache_dir / "photos").mkdir()
    (cache_dir / "photos" / "weights-1.safetensors").write_bytes(bytes(10))
    return cache_dir


def run(*arguments):
    result = CliRunner().invoke(cli, ["cache", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def entries(cache_dir):
    return sorted(path.name for path in cache_dir.rglob("weights-*.safetensors") if path.parent.name != "photos")


def test_the_list_says_sizes_ages_kinds_and_models(cache_dir, models):
    output = run("--cache-dir", cache_dir)
    sizes = {
        path: path.stat().st_size for path in cache_dir.rglob("*-*") if path.is_file() and "photos" not in str(path)
    }
    assert f"{cache_dir}: 4 entries, {sum(sizes.values()) / 1e9:.2f} GB" in output
    lines = [line.split() for line in output.splitlines()[2:6]]
    assert [line[1:] for line in lines if line[2] == "weights" and line[-1].endswith("first/model.safetensors")] == [
        ["3.0", "weights", form, str(models[0] / "first" / "model.safetensors")]
        for form in ("float32-rows", "bfloat16-rows")
    ]
    assert [line[1:4] for line in lines if line[-1].endswith("second/model.safetensors")] == [
        ["0.0", "weights", "float32-rows"]
    ]
    assert sum(line[2] == "unfinished" for line in lines) == 1
    assert "photos" not in output
    assert "notes" not in output


def test_the_default_folder_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run().strip() == f"{tmp_path / 'lamella'}: 0 entries, 0.00 GB"
    assert "removed 0 of" in run("clear")


def test_clear_removes_all_of_lamellas_and_nothing_else(cache_dir):
    assert "removed 4 of" in run("--cache-dir", cache_dir, "clear")
    left = sorted(path.name for path in cache_dir.rglob("*") if path.is_file())
    assert left == ["notes.txt", "weights-1.safetensors"]
    assert len(list(cache_dir.iterdir())) == 2, "folders that are empty go, too"


@pytest.mark.parametrize(
    ("filters", "num_removed", "num_left"),
    [
        (["--model", "second/model"], 1, 2),
        (["--model", "first/model"], 2, 1),
        (["--older-than", "2"], 2, 1),
        (["--older-than", "4"], 0, 3),
        (["--kind", "unfinished"], 1, 3),
        (["--kind", "weights", "--older-than", "2", "--model", "second"], 0, 3),
    ],
)
def test_clear_with_filters(cache_dir, filters, num_removed, num_left):
    assert f"removed {num_removed} of" in run("--cache-dir", cache_dir, "clear", *filters)
    assert len(entries(cache_dir)) == num_left
    assert len(list(cache_dir.rglob("*.sum"))) == num_left


def test_what_is_being_written_is_not_touched(cache_dir):
    from lamella.model_executor.weights.cache_folder import written_entry

    path = cache_dir / ("model-" + "a" * 20) / ("weights-x-" + "b" * 20 + ".safetensors")
    with written_entry(path) as file:
        file.write(b"whole")
        assert "removed 3 of" in run("--cache-dir", cache_dir, "clear")  # the abandoned part went when this one began
    assert path.read_bytes() == b"whole"
