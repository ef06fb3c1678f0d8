"""`lamella plan`: what it prints, what it refuses, and the picture."""

from __future__ import annotations

import sys
import types

import pytest
from click.testing import CliRunner

from lamella.cli import cli
from lamella.errors import ConfigError
from lamella.planner.plot import plot_plan
from tests.helpers.plans import lines_of, plan_of


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", "--context", "32768", "--memory", "80GiB", *arguments])


def test_the_command_prints_the_plan():
    result = run("--model", "mimo-v2-flash", "--max-num-batched-tokens", "8192")
    assert result.exit_code == 0, result.output
    assert result.stdout == plan_of("mimo-v2-flash").report() + "\n"
    assert ["6-10", "sliding_129", "sliding", "window", "129", "8", "192", "128", "5,120"] in lines_of(result.stdout)


def test_flags_reach_the_plan():
    result = run(
        *("--model", "gemma-3-270m", "--dtype", "float32", "--page-size", "32", "--ratio", "0.3"),
        *("--swa-eviction-interval", "64"),
    )
    assert result.exit_code == 0, result.output
    # 3 full layers * 32 tokens * 1 head * 512 elements * 4 bytes
    assert ["full", "3", "196,608", "3", "5", "0.00%"] in lines_of(result.stdout)
    assert "eviction interval: 64 tokens" in result.stdout
    assert [line[0] for line in lines_of(result.stdout) if line and line[0].startswith("r=")] == ["r=0.3"]


def test_what_cannot_be_planned_is_one_line():
    result = run("--model", "mimo-v2-flash", "--memory", "1MiB")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: kv_cache_memory_bytes=1048576: one request of max_model_len=32768")
    assert len(result.stderr.splitlines()) == 1


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--model", "gpt-oss-20b", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    assert 'pip install ".[bench]"' in result.stderr
    assert ["elastic", "105", "2,048"] not in lines_of(result.stdout)  # 2,048-token chunks leave room for more
    assert any(line[:1] == ["elastic"] for line in lines_of(result.stdout))


def test_plots_are_png_files(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plot_plan(plan_of("gpt-oss-20b"), tmp_path / "plan.svg")


class RecordingAxes:
    """Takes what is drawn; methods that do not matter here do nothing."""

    def __init__(self):
        self.lines = {}
        self.marked = []

    def plot(self, xs, ys, *, label, **style):
        self.lines[label] = (tuple(xs), tuple(ys))

    def axvline(self, x, **style):
        self.marked.append(x)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class RecordingFigure:
    made: list

    def __init__(self, **options):
        self.axes = RecordingAxes()
        self.saved = []
        self.made.append(self)

    def subplots(self):
        return self.axes

    def legend(self, **options):
        pass

    def savefig(self, path, **options):
        self.saved.append(path)


def test_the_plot_draws_every_curve(monkeypatch, tmp_path):
    """Against a stand-in for matplotlib's Figure: what is drawn, not how it looks."""
    figure_class = type("Figure", (RecordingFigure,), {"made": []})
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=figure_class))
    plan = plan_of("mimo-v2-flash")
    plot_plan(plan, tmp_path / "plan.png")
    (figure,) = figure_class.made
    assert figure.saved == [tmp_path / "plan.png"]
    assert figure.axes.marked == [32_768]
    assert set(figure.axes.lines) == {outcome.system for outcome in plan.outcomes}
    contexts, tokens = figure.axes.lines["elastic"]
    assert contexts == (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
    assert tokens[4] == 109 * 32_768 / 1e6
