"""`lamella plan`: what it prints, what it refuses, and the picture."""

from __future__ import annotations

import sys
import types

import pytest
from click.testing import CliRunner

from lamella.cli import cli
from lamella.errors import ConfigError
from lamella.planner.plan import PlanOptions
from lamella.planner.plot import plot_plan
from lamella.plot_path import check_plot_path
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
    cells = [line for line in lines_of(result.stdout) if line and line[0].startswith("r=") and line[2] == "F"]
    assert [line[0] for line in cells] == ["r=0.3"]


def test_drafts_take_room_in_the_windows():
    """W - 1 + P + k = 511 + 16 + 24 tokens are 35 pages, and there is one more; without drafts it is 33 and one."""
    found = []
    for flags in ((), ("--num-speculative-tokens", "24")):
        result = run("--model", "gemma-3-270m", "--dtype", "float32", *flags)
        assert result.exit_code == 0, result.output
        row = next(line for line in lines_of(result.stdout) if line and line[0] == "32,768")
        found.append((int(row[1].replace(",", "")), row[-2]))
    assert [pages for _, pages in found] == ["34", "36"]
    assert found[1][0] < found[0][0], "fewer requests fit"
    refused = run("--model", "gemma-3-270m", "--num-speculative-tokens", "1000")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: --num-speculative-tokens=1000 is out of range; give a whole number from 0")


def test_what_cannot_be_planned_is_one_line():
    result = run("--model", "mimo-v2-flash", "--memory", "1MiB")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --memory=1048576: one request of --context=32768")
    assert len(result.stderr.splitlines()) == 1


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--model", "gpt-oss-20b", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    assert 'pip install ".[bench]"' in result.stderr
    assert result.stdout == ""  # found out before anything is computed


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


def refused(*arguments):
    result = run("--model", "gpt-oss-20b", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("plot", "problem"),
    [("plan.svg", "ends in .png"), ("plan", "ends in .png"), ("absent/plan.png", "its folder does not exist"),
     ("folder.png", "cannot be written"), ("file/plan.png", "its folder does not exist")],
)  # fmt: skip
def test_the_plot_is_checked_before_anything_is_planned(monkeypatch, tmp_path, plot, problem):
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.ModuleType("matplotlib.figure"))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    planned = []
    monkeypatch.setattr("lamella.cli.plan_memory", lambda *arguments: planned.append(arguments))
    monkeypatch.setattr("lamella.cli.model_specs", lambda *arguments: planned.append(arguments))
    message = refused("--plot", str(tmp_path / plot))
    assert message.startswith(f"Error: --plot='{tmp_path / plot}'")
    assert problem in message
    assert planned == []


def test_checking_a_plot_leaves_what_is_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.ModuleType("matplotlib.figure"))
    check_plot_path(tmp_path / "new.png")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.png").write_bytes(b"picture")
    check_plot_path(tmp_path / "old.png")
    assert (tmp_path / "old.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--memory", "0"], "Error: --memory=0 is out of range; give a whole number from 1 to"),
        (["--memory", "9" * 400], "Error: --memory=9"),
        (["--context", "0"], "Error: --context=0 is out of range"),
        (["--context", str(2**31)], "Error: --context=2147483648 is out of range"),
        (["--page-size", "0"], "Error: --page-size=0 is out of range"),
        (["--page-size", str(2**40)], "Error: --page-size=1099511627776 is out of range"),
        (["--max-num-batched-tokens", "-1"], "Error: --max-num-batched-tokens=-1 is out of range"),
        (["--swa-eviction-interval", "0"], "Error: --swa-eviction-interval=0 is out of range"),
        (["--ratio", "0"], "Error: --ratio=0.0: must be a positive number"),
        (["--ratio", "1e300"], "Error: --ratio=1e+300: must be a positive number"),
        (["--memory", "1MiB"], "Error: --memory=1048576: one request of --context=32768"),
        (["--model", "no/such/folder"], "Error: --model='no/such/folder'"),
    ],
)
def test_flags_are_named_as_they_are_typed(arguments, start):
    assert refused(*arguments).startswith(start)


@pytest.mark.parametrize("value", ["nan", "inf", "1e400"])
def test_a_ratio_that_is_no_number_is_a_usage_error(value):
    result = run("--model", "gpt-oss-20b", "--ratio", value)
    assert result.exit_code == 2
    assert f"Invalid value for '--ratio': '{value}' is not a number" in result.stderr


def test_refusals_in_the_table_name_flags():
    result = run("--model", "mimo-v2-flash", "--memory", "4GiB", "--ratio", "0.001")
    assert result.exit_code == 0, result.output
    assert "--ratio=0.001" in result.stdout
    assert "--memory=4294967296" in result.stdout
    assert "swa_full_tokens_ratio" not in result.stdout


@pytest.mark.parametrize(
    "name", ["memory_bytes", "context_tokens", "page_tokens", "chunk_tokens", "interval_tokens"]
)  # fmt: skip
def test_every_number_of_a_plan_has_a_range(name):
    for value in (0, -1, 2**64, 10**400, 1.5, "8", True, float("nan")):
        with pytest.raises(ConfigError, match=f"^{name}=.*a whole number from 1 to"):
            PlanOptions(**{"memory_bytes": 2**30, "context_tokens": 100, name: value})
    for ratio in (0, -1, float("nan"), float("inf"), 10**400, "0.5", True):
        with pytest.raises(ConfigError, match="must be a positive number"):
            PlanOptions(memory_bytes=2**30, context_tokens=100, ratios=(0.5, ratio))
