"""What the replay benchmark makes of its results: comparisons, tables and the plot, from made-up figures."""

import math
import sys
import types
from dataclasses import replace

import pytest

from kv_replay.comparison import compare
from kv_replay.host_report import decode_report, prompt_report
from kv_replay.plot import plot_replays
from kv_replay.report import replay_report
from kv_replay.results import Cell, Measurements, Place, PromptCost, Refusal, Result
from lamella.errors import ConfigError
from lamella.plot_path import check_plot_path

REFUSED = Refusal("no room")


def measured(prefill_tokens=1000, **figures):
    defaults = {
        "num_prompt_tokens": 10_000, "hit_share": 0.5, "steps": 100, "mean_running": 4.0, "max_running": 8,
        "preemptions": 0, "host_us_per_step_p50": 300.0, "host_us_per_step_min": 200.0,
        "host_us_per_step_mean": 400.0, "add_us_p50": 10.0, "wait_steps_p50": 5.0, "wait_steps_max": 50,
        "chunk_tokens": 8192, "used_interval_tokens": 16, "peak_bytes": {"full": 4 * 2**20, "sliding_128": 3 * 2**20},
        "unusable_bytes_share": 0.0, "windowed_bytes_mean": 2.5 * 2**20, "windowed_held_over_ideal": 1.25,
    }  # fmt: skip
    return Measurements(prefill_tokens_computed=prefill_tokens, **{**defaults, **figures})


def result(system, outcome, *, budget=8.0, trace="agentic", policy="fcfs", interval=16, repeat=0):
    if isinstance(outcome, int):
        outcome = measured(outcome)
    if interval is None and isinstance(outcome, Measurements):  # vLLM's
        outcome = replace(outcome, used_interval_tokens=None)
    cell = Cell(
        trace=trace, layout="gpt-oss-20b", budget_requests=budget, budget_bytes=2**30, policy=policy,
        interval_tokens=interval, system=system, repeat=repeat,
    )  # fmt: skip
    return Result(cell, outcome)


def place(budget, trace="agentic"):
    return Place(trace, "gpt-oss-20b", budget)


def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def table_after(text, title):
    """Rows of the table that follows the line `title`, without its head."""
    lines = text[text.index(f"{title}\n") :].splitlines()[2:]
    return rows_of("\n".join(lines[: lines.index("")] if "" in lines else lines))[2:]


# Comparison


def test_means_are_geometric_and_over_the_cells_that_both_ran():
    results = [
        result("lamella", 100, budget=4), result("split:0.1", 400, budget=4), result("split:0.8", REFUSED, budget=4),
        result("lamella", 200, budget=8), result("split:0.1", 200, budget=8), result("split:0.8", 300, budget=8),
        result("lamella", REFUSED, budget=2), result("split:0.1", 900, budget=2),
    ]  # fmt: skip
    (comparison,) = compare(results)
    assert comparison.variant == ("fcfs", 16)
    first, second = comparison.means
    # 400/100 and 200/200: their geometric mean is 2, their arithmetic one 2.5. What lamella refused is in no mean.
    assert (first.system, first.num_both, first.ratio) == ("split:0.1", 2, pytest.approx(2.0))
    assert (first.refused, first.only_system) == ((), (place(2),))
    assert (second.system, second.num_both, second.ratio) == ("split:0.8", 1, pytest.approx(1.5))
    assert (second.refused, second.only_system) == ((place(4),), ())


def test_each_cell_is_compared_with_its_best_ratio():
    results = [
        result("lamella", 1500, budget=4), result("split:0.1", 1200, budget=4), result("split:0.4", 1400, budget=4),
        result("lamella", 500, budget=8), result("split:0.1", 900, budget=8), result("split:0.4", 800, budget=8),
        result("lamella", 500, budget=16), result("split:0.1", REFUSED, budget=16),
        result("split:0.4", REFUSED, budget=16),
        # Fewer prompt tokens: the same difference as at x4 is twice the share.
        result("lamella", measured(1500, num_prompt_tokens=5000), budget=4, trace="synthetic"),
        result("split:0.4", 1200, budget=4, trace="synthetic"),
        result("hybrid-off", 1, budget=4),
    ]  # fmt: skip
    (comparison,) = compare(results)
    gaps = [(gap.place, gap.best_system, gap.best_tokens, gap.tokens, gap.share) for gap in comparison.gaps]
    assert gaps == [
        (place(4), "split:0.1", 1200, 1500, 0.03),
        (place(8), "split:0.4", 800, 500, -0.03),
        (place(4, "synthetic"), "split:0.4", 1200, 1500, 0.06),
    ]
    assert comparison.worst_gap.place == place(4, "synthetic")
    (refusing,) = compare([*results, result("lamella", REFUSED, budget=2), result("split:0.1", 2000, budget=2)])
    assert (refusing.worst_gap.place, refusing.worst_gap.share) == (place(2), None)


def test_policies_and_intervals_are_compared_each_with_its_own_and_with_vllm():
    results = [
        result("lamella", 100), result("split:0.1", 200), result("lamella", 50, policy="prefix"),
        result("split:0.1", 25, policy="prefix"), result("lamella", 400, interval=128),
        result("vllm", 400, interval=None),
    ]  # fmt: skip
    comparisons = compare(results)
    ratios = {one.variant: {mean.system: mean.ratio for mean in one.means} for one in comparisons}
    assert ratios == {
        ("fcfs", 16): pytest.approx({"split:0.1": 2.0, "vllm": 4.0}),
        ("prefix", 16): pytest.approx({"split:0.1": 0.5, "vllm": 8.0}),
        ("fcfs", 128): pytest.approx({"vllm": 1.0}),
    }
    assert [len(one.gaps) for one in comparisons] == [1, 1, 0]


def test_vllm_s_best_is_its_best_setting_in_each_figure():
    def figures(hit_share, mean_running, steps, held):
        return measured(hit_share=hit_share, mean_running=mean_running, steps=steps, windowed_held_over_ideal=held)

    results = [
        result("lamella", figures(0.9, 5.6, 70, 1.2)),
        result("vllm", figures(0.3, 5.2, 73, 1.9), interval=None),
        result("vllm:0", figures(0.2, 5.5, 80, 1.7), interval=None),
        result("vllm-dense", REFUSED, interval=None),
    ]
    (comparison,) = compare(results)
    assert comparison.vllm_cells == [(place(8), 0.9, 0.3, 5.6, 5.5, 70, 73, 1.2, 1.7)]
    (row,) = table_after(replay_report(results), "lamella and the best of vLLM's settings in each figure")
    assert row == ["agentic, gpt-oss-20b, x8", "0.900", "0.300", "5.6", "5.5", "70", "73", "1.20", "1.70"]


def test_there_is_nothing_to_compare_with_one_system():
    assert compare([result("lamella", 100), result("lamella", 50, policy="prefix")]) == []
    assert compare([result("split:0.1", 100), result("split:0.8", 50)]) == []


# Tables


def test_the_comparison_names_the_worst_cell_and_who_refused():
    results = [
        result("lamella", 1500, budget=4), result("split:0.1", 1200, budget=4), result("split:0.8", REFUSED, budget=4),
        result("lamella", 500, budget=8), result("split:0.1", 900, budget=8), result("split:0.8", 800, budget=8),
    ]  # fmt: skip
    report = replay_report(results)
    ratio = math.sqrt(1200 / 1500 * 900 / 500)
    assert table_after(report, "lamella against the others") == [
        ["split:0.1", f"{ratio:.4f}", "2", "0"],
        ["split:0.8", "1.6000", "1", "1"],
    ]
    assert "split:0.8 refused agentic, gpt-oss-20b, x4." in report
    assert ["agentic, gpt-oss-20b, x8", "500", "split:0.8", "800", "-3.00 %"] in rows_of(report)
    assert "Worst cell: agentic, gpt-oss-20b, x4: +3.00 % of all prompt tokens against split:0.1." in report
    assert "Waiting" not in report
    assert "Eviction intervals" not in report


def test_policies_stand_side_by_side_and_vllm_under_its_own():
    results = [
        result("lamella", measured(hit_share=0.05, wait_steps_p50=120.0, wait_steps_max=530)),
        result("lamella", measured(hit_share=0.8, wait_steps_p50=3.0, wait_steps_max=2100), policy="prefix"),
        result("split:0.8", REFUSED),
        result("split:0.8", measured(hit_share=0.6, wait_steps_p50=9.0, wait_steps_max=90), policy="prefix"),
        result("vllm", measured(hit_share=0.04, wait_steps_p50=130.0, wait_steps_max=600), interval=None),
    ]
    at = ["agentic", "gpt-oss-20b", "x8"]
    assert table_after(replay_report(results), "Waiting") == [
        [*at, "lamella", "16", "0.050", "120 (530)", "0.800", "3 (2100)"],
        [*at, "split:0.8", "16", "", "", "0.600", "9 (90)"],
        [*at, "vllm", "", "0.040", "130 (600)", "", ""],
    ]
    # Only prefix was asked for: vLLM is still first come, first served.
    head, _, *rows = rows_of(replay_report(results[1:2] + results[4:]))[:4]
    assert [row[head.index("policy")] for row in rows] == ["prefix", "fcfs"]


def test_intervals_beside_what_they_cost():
    times = {"host_us_per_step_p50": 90.0, "host_us_per_step_mean": 100.0}
    results = [
        result("lamella", 100),
        result("lamella", measured(used_interval_tokens=128, windowed_bytes_mean=9.0 * 2**20, **times), interval=128),
        result("split:0.8", measured(used_interval_tokens=48), interval=128),
    ]
    at = ["agentic", "gpt-oss-20b", "x8"]
    assert table_after(replay_report(results), "Eviction intervals") == [
        [*at, "lamella", "fcfs", "16", "300", "400", "2.5", "1.25", "3.0"],
        [*at, "lamella", "fcfs", "128", "90", "100", "9.0", "1.25", "3.0"],
        [*at, "split:0.8", "fcfs", "128 (used: 48)", "300", "400", "2.5", "1.25", "3.0"],
    ]


def test_repeats_of_a_decode_are_one_row():
    def run(repeat, p50, least, mean):
        times = {"host_us_per_step_p50": p50, "host_us_per_step_min": least, "host_us_per_step_mean": mean}
        return measured(**times), repeat

    results = [
        result(system, outcome, budget=None, trace="decode", repeat=repeat)
        for outcome, repeat in (run(0, 50.0, 40.0, 60.0), run(1, 90.0, 30.0, 99.0), run(2, 70.0, 45.0, 80.0))
        for system in ("lamella", "hybrid-off")
    ]
    results.append(result("split:0.1", REFUSED, budget=None, trace="decode"))
    _, _, *rows = rows_of(decode_report(results))
    figures = ["70", "50", "40", "30", "80", "2.5", "1.25", "3.0"]
    assert [row[2:] for row in rows] == [
        ["lamella", "16", "3", *figures],
        ["hybrid-off", "16", "3", *figures],
        ["split:0.1", "16", "1", "refused: no room", *[""] * 7],
    ]


def test_repeats_of_prompts_are_one_row():
    runs = [
        PromptCost.of([(1e-6 * run, 1e-5 * run, 1e-4 * run), (3e-6, 3e-5, 3e-4)], [2e-5 * run, 4e-5])
        for run in (1, 5, 7)
    ]
    results = [result("lamella", cost, budget=None, trace="prompts", repeat=index) for index, cost in enumerate(runs)]
    results.append(result("vllm", REFUSED, budget=None, trace="prompts", interval=None))
    _, _, *rows = rows_of(prompt_report(results))
    # Medians of a run: of 111 µs and 333 µs, 555 and 333, 777 and 333: 222, 444 and 555.
    assert rows == [
        ["prompts", "gpt-oss-20b", "lamella", "16", "3", "4", "40", "400", "70", "444", "222", "111"],
        ["prompts", "gpt-oss-20b", "vllm", "", "1", "refused: no room", *[""] * 6],
    ]


# Plot


class RecordingPanel:
    """Takes what is drawn; methods that do not matter here do nothing."""

    def __init__(self):
        self.lines, self.title, self.ylabel, self.ticks = {}, None, None, None

    def plot(self, xs, ys, *, label, **style):
        self.lines[label] = list(zip(xs, ys, strict=True))
        return (label,)

    def set_title(self, title, **style):
        self.title = title

    def set_ylabel(self, label):
        self.ylabel = label

    def set_xticks(self, ticks, labels):
        self.ticks = list(zip(ticks, labels, strict=True))

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.fixture
def figures(monkeypatch):
    """A stand-in for matplotlib; the figures that are made."""
    made = []

    class Figure:
        def __init__(self, **options):
            self.saved, self.legends = [], []
            made.append(self)

        def subplots(self, num_rows, num_columns, **options):
            self.panels = [[RecordingPanel() for _ in range(num_columns)] for _ in range(num_rows)]
            return self.panels

        def legend(self, handles, labels, **options):
            self.legends += labels

        def savefig(self, path, **options):
            self.saved.append(path)

    package = types.ModuleType("matplotlib")
    package.figure = types.SimpleNamespace(Figure=Figure)
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", package.figure)
    return made


def test_panels_are_hit_share_and_running_requests_per_trace_and_layout(figures, tmp_path):
    results = [
        result("lamella", measured(hit_share=0.9, mean_running=8.0), budget=32),
        result("lamella", measured(hit_share=0.3, mean_running=5.0), budget=8),
        result("split:0.8", REFUSED, budget=8),
        result("split:0.8", measured(hit_share=0.4, mean_running=7.0), budget=32),
        result("lamella", measured(hit_share=0.1, mean_running=2.0), budget=8, trace="synthetic"),
    ]
    plot_replays(results, tmp_path / "plot.png")
    (figure,) = figures
    assert figure.saved == [tmp_path / "plot.png"]
    panels = [row[0] for row in figure.panels]
    assert [panel.title.split(", ")[1] for panel in panels] == ["agentic", "agentic", "synthetic", "synthetic"]
    assert [panel.ylabel for panel in panels] == 2 * ["hit share of prompt tokens", "requests running, mean"]
    # What was refused has no point.
    assert panels[0].lines == {"lamella": [(8, 0.3), (32, 0.9)], "split:0.8": [(32, 0.4)]}
    assert panels[1].lines == {"lamella": [(8, 5.0), (32, 8.0)], "split:0.8": [(32, 7.0)]}
    assert panels[2].lines == {"lamella": [(8, 0.1)]}
    assert panels[3].lines == {"lamella": [(8, 2.0)]}
    assert panels[3].ticks == [(8, "x8"), (32, "x32")]
    assert figure.legends == ["lamella", "split:0.8"]


def test_lines_name_policy_and_interval_where_there_are_several(figures, tmp_path):
    results = [
        result("lamella", 1),
        result("lamella", 1, policy="prefix"),
        result("lamella", 1, interval=128),
        result("vllm", 1, interval=None),
    ]
    plot_replays(results, tmp_path / "plot.png")
    assert figures[0].legends == ["lamella fcfs I=16", "lamella prefix I=16", "lamella fcfs I=128", "vllm"]
    plot_replays([results[1], results[3]], tmp_path / "plot.png")
    assert figures[1].legends == ["lamella", "vllm"]


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(figures, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        check_plot_path(tmp_path / "plot.svg")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_plot_path(tmp_path / "missing" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[bench\]"'):
        check_plot_path(tmp_path / "plot.png")
