"""The comparison of engines, with workers that are scripts of a few lines: who runs when, and what fails how."""

import json
import os
import sys
import time
import types
from pathlib import Path

import pytest

from compare_engines.engines import EngineSetup
from compare_engines.plot import plot_comparison
from compare_engines.report import comparison_report
from compare_engines.results import Spread, agreement, first_token_agreement, ratios
from compare_engines.rounds import compare, round_order
from compare_engines.worker import Worker, WorkerError
from compare_engines.workloads import WORKLOADS, Workload
from lamella.errors import ConfigError

DRIVERS = Path(__file__).parents[2] / "benchmarks" / "compare_engines" / "drivers"
FEW = Workload("few", num_requests=2, shared_tokens=0, own_tokens=5, output_tokens=3)
MANY = Workload("many", num_requests=40, shared_tokens=3000, own_tokens=7, output_tokens=2)

# Answers as asked, in a tenth of a second per request and round of its own; notes in a file what it was asked for.
# Where it is told to, it does something else when it is asked for workload "few" (2 x 5 tokens).
FAKE = """
import json, os, sys, time
name, notes, trouble, pace = sys.argv[1:5]
def note(what):
    with open(notes, "a") as file:
        file.write(f"{name} {what}\\n")
def answer(value):
    print(json.dumps(value), flush=True)
settings = json.loads(sys.stdin.readline())["load"]
note("load")
answer({"versions": {"fake": "1.5"}, "settings": {"seen": settings}})
for line in sys.stdin:
    question = json.loads(line)
    prompts, output_tokens = question["prompts"], question["output_tokens"]
    note(f"{len(prompts)}x{len(prompts[0])}+{output_tokens} shared {question['shared_tokens']}")
    if len(prompts) == 2 and len(prompts[0]) == 5:
        if trouble == "dies":
            print("no memory left, says the fake", file=sys.stderr)
            sys.exit(7)
        if trouble == "is killed":
            os.kill(os.getpid(), 9)
        if trouble == "hangs":
            time.sleep(600)
        if trouble == "forgets one":
            prompts = prompts[:1]
        if trouble == "says too much":
            output_tokens += 1
        if trouble == "babbles":
            print("hello", flush=True)
    rounds = open(notes).read().count(f"{name} load")
    output = [prompt[:1] * output_tokens for prompt in prompts]
    if trouble == "is unfair" and len(prompts) == 2 and output_tokens == 3:
        output = [output[0][:1], output[1] + output[0][1:]]
    answer({"seconds": float(pace) * len(prompts) * rounds, "output_token_ids": output})
note("end")
"""


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "notes"


@pytest.fixture
def fake(tmp_path, notes):
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE)

    def setup(name, *, trouble="none", pace=0.1, precision="fp32", **settings):
        command = (sys.executable, str(script), name, str(notes), trouble, str(pace))
        return EngineSetup(name, precision, command, settings)

    return setup


def run(engines, workloads=(FEW,), *, num_rounds=1, **options):
    return compare(engines, workloads, vocab_size=50, num_rounds=num_rounds, timeout_seconds=60.0, **options)


class TestArithmetic:
    def test_spread(self):
        assert Spread.of([5.0, 2.0, 9.0, 4.0]) == Spread(4.5, 2.0, 9.0)
        assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
        assert Spread(4.5, 2.0, 9.126).text() == "4.50 (2.00\u20139.13)"

    def test_ratios_are_taken_round_by_round(self):
        # Round 2 was slow for both: the ratio of medians would be 6 / 4.
        assert ratios([6.0, 30.0, 5.0], [4.0, 10.0, 2.0]) == [1.5, 3.0, 2.5]
        assert Spread.of(ratios([6.0, 30.0, 5.0], [4.0, 10.0, 2.0])) == Spread(2.5, 1.5, 3.0)

    def test_ratios_of_the_rounds_that_both_have(self):
        assert ratios([6.0], [4.0, 10.0]) == [1.5]

    def test_agreement_stops_at_a_requests_first_difference(self):
        base = [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert agreement(base, base) == 1.0
        assert agreement([[1, 2, 9, 4], [5, 6, 7, 8]], base) == 6 / 8
        assert agreement([[9, 2, 3, 4], [5, 9, 7, 8]], base) == 1 / 8
        assert first_token_agreement([[9, 2, 3, 4], [5, 9, 7, 8]], base) == 0.5

    def test_a_comparisons_ratio_and_rate(self, fake):
        comparison = run([fake("ours", pace=0.1), fake("theirs", pace=0.25)], num_rounds=3)
        ours, theirs = (comparison.find(name, "few") for name in ("ours", "theirs"))
        assert ours.seconds == pytest.approx([0.2, 0.4, 0.6])
        assert theirs.seconds == pytest.approx([0.5, 1.0, 1.5])
        ratio = comparison.ratio("theirs", "few")
        assert (ratio.median, ratio.least, ratio.most) == pytest.approx((2.5, 2.5, 2.5))
        assert theirs.tokens_per_second == pytest.approx(6.0)  # 2 requests of 3 tokens in 1.0 s


class TestWorkloads:
    def test_sizes(self):
        sizes = {
            name: (w.num_requests, w.shared_tokens, w.own_tokens, w.output_tokens) for name, w in WORKLOADS.items()
        }
        assert sizes == {
            "single": (1, 0, 128, 128),
            "short": (64, 0, 128, 128),
            "long": (8, 0, 4096, 64),
            "prefix": (32, 2048, 64, 32),
        }

    def test_prompts_share_the_prefix_and_nothing_else(self):
        prompts = WORKLOADS["prefix"].prompts(1000, seed=0)
        assert {len(prompt) for prompt in prompts} == {2112}
        assert len({tuple(prompt[:2048]) for prompt in prompts}) == 1
        assert len({tuple(prompt[2048:2060]) for prompt in prompts}) == 32
        tokens = {token for prompt in prompts for token in prompt}
        assert (min(tokens), max(tokens)) == (0, 999)

    def test_the_seed_decides(self):
        first, same, other = (WORKLOADS["single"].prompts(1000, seed) for seed in (3, 3, 4))
        assert first == same
        assert first != other

    def test_resized(self):
        sizes = {"num_requests": 2, "own_tokens": None, "shared_tokens": 20, "output_tokens": 4}
        assert WORKLOADS["prefix"].resized(**sizes) == Workload("prefix", 2, 20, 64, 4)
        assert WORKLOADS["short"].resized(**sizes) == Workload("short", 2, 0, 128, 4)


class TestRounds:
    def test_each_begins_another_round(self):
        assert [round_order("abc", index) for index in range(4)] == [
            ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
        ]  # fmt: skip

    def test_one_at_a_time_each_with_all_workloads(self, fake, notes):
        run([fake("a"), fake("b")], [FEW, MANY], num_rounds=2)
        asked = ["load", "1x16+1 shared 0", "2x64+8 shared 0", "2x5+3 shared 0", "40x3007+2 shared 3000", "end"]
        assert notes.read_text().splitlines() == [f"{name} {what}" for name in "abba" for what in asked]

    def test_everyone_gets_the_same_prompts(self, fake):
        comparison = run([fake("a"), fake("b")])
        a, b = (comparison.find(name, "few").output_token_ids for name in "ab")
        assert a == b == [prompt[:1] * 3 for prompt in FEW.prompts(50, 0)]

    def test_start_is_measured_from_outside_once_a_round(self, fake):
        start = time.perf_counter()
        comparison = run([fake("a")], [FEW, MANY], num_rounds=2)
        elapsed = time.perf_counter() - start
        few, many = (comparison.find("a", name) for name in ("few", "many"))
        assert few.start_seconds == many.start_seconds
        assert len(few.start_seconds) == 2
        assert 0 < sum(few.start_seconds) < elapsed

    def test_the_worker_is_given_its_settings_and_reports_more(self, fake):
        facts = run([fake("a", model="m", num_threads=2)]).engines["a"]
        assert facts.settings == {"model": "m", "num_threads": 2, "seen": {"model": "m", "num_threads": 2}}
        assert facts.versions == {"fake": "1.5"}

    def test_environment(self):
        setup = EngineSetup("a", "fp32", ("x",), {}, {"HOME": None, "OMP_NUM_THREADS": "3", "PYTHONPATH": "p"})
        environment = setup.full_environment()
        assert "HOME" not in environment
        assert (environment["OMP_NUM_THREADS"], environment["PATH"]) == ("3", os.environ["PATH"])
        assert setup.told_settings() == {"OMP_NUM_THREADS": "3"}


class TestFailures:
    @pytest.mark.parametrize(
        ("trouble", "words"),
        [
            ("dies", "the worker ended with exit code 7 while running few; its log ends:\n"
                     "no memory left, says the fake"),
            ("is killed", "the worker was killed by signal 9 while running few; no log"),
            ("babbles", "the worker answered b'hello' while running few, which is no JSON object; no log"),
            ("forgets one", "few gave 3 output tokens for 1 requests, 3 to 3 each, instead of 3 for each of 2; its "
                            "time is not comparable"),
            ("says too much", "few gave 8 output tokens for 2 requests, 4 to 4 each, instead of 3 for each of 2; its "
                              "time is not comparable"),
            ("is unfair", "few gave 6 output tokens for 2 requests, 1 to 5 each, instead of 3 for each of 2; its "
                          "time is not comparable"),
        ],
    )  # fmt: skip
    def test_one_fails_and_the_others_go_on(self, fake, notes, trouble, words):
        comparison = run([fake("a"), fake("b", trouble=trouble), fake("c")], num_rounds=2)
        (failure,) = comparison.failures
        assert (failure.engine, failure.round_number, failure.message) == ("b", 1, f"b: {words}")
        assert comparison.find("b", "few") is None
        assert comparison.ratio("b", "few") is None
        assert [len(comparison.find(name, "few").seconds) for name in "ac"] == [2, 2]
        assert [line.split()[0] for line in notes.read_text().splitlines() if "load" in line] == [
            "a",
            "b",
            "c",
            "c",
            "a",
        ]
        assert words in comparison_report(comparison)

    def test_a_worker_that_hangs_is_ended(self, fake):
        setup = fake("b", trouble="hangs")
        question = {"prompts": FEW.prompts(9, 0), "output_tokens": 3, "shared_tokens": 0}
        with Worker("b", setup.command, setup.full_environment(), timeout_seconds=5.0) as worker:
            worker.ask({"load": {}}, "loading")
            with pytest.raises(WorkerError, match=r"b: the worker did not answer within 5 s while running few"):
                worker.ask(question, "running few")
        assert worker._process.returncode == -9

    def test_a_worker_that_reads_nothing_does_not_block(self):
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        with (
            pytest.raises(WorkerError, match="did not answer within 1 s"),
            Worker("deaf", command, dict(os.environ), timeout_seconds=1.0) as worker,
        ):
            worker.ask({"prompts": [[1] * 500_000]}, "running")  # more than a pipe holds

    def test_what_a_worker_started_ends_with_it(self):
        code = (
            "import json, subprocess; child = subprocess.Popen(['sleep', '600']); input();"
            "print(json.dumps({'child': child.pid}), flush=True)"
        )
        with Worker("parent", (sys.executable, "-c", code), dict(os.environ), timeout_seconds=60.0) as worker:
            child = worker.ask({}, "running")["child"]
            assert _is_running(child)
        deadline = time.monotonic() + 20
        while _is_running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(child)

    def test_a_program_that_cannot_be_started(self, fake):
        comparison = run([fake("a"), EngineSetup("b", "fp32", ("/no/such/python", "x"))])
        (failure,) = comparison.failures
        assert failure.message.startswith("b: /no/such/python cannot be started: ")


def _is_running(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestOutput:
    def test_json(self, fake):
        comparison = run([fake("ours", pace=0.1), fake("theirs", pace=0.25, precision="int8")], num_rounds=2)
        found = json.loads(json.dumps(comparison.to_json()))
        assert (found["base"], found["num_rounds"], found["failures"]) == ("ours", 2, [])
        assert found["engines"]["theirs"]["versions"] == {"fake": "1.5"}
        assert set(found["machine"]) >= {"processor", "num_cores", "memory_bytes", "system"}
        theirs = found["results"][1]
        assert (theirs["engine"], theirs["workload"], theirs["precision"]) == ("theirs", "few", "int8")
        assert theirs["seconds"] == pytest.approx([0.5, 1.0])
        assert theirs["output_tokens"] == 6
        assert len(theirs["start_seconds"]) == 2
        assert theirs["ratio_to_base"]["median"] == pytest.approx(2.5)
        assert (theirs["token_agreement"], theirs["first_token_agreement"]) == (1.0, 1.0)

    def test_unequal_work_has_tables_of_its_own(self, fake):
        engines = [fake("ours"), fake("full", pace=0.2), fake("small", pace=0.05, precision="Q4_K_M")]
        report = comparison_report(run(engines))
        full, reduced = report.split("### Seconds, reduced weights")
        assert "| full | fp32 | 0.40 (0.40\u20130.40), 15.0 tok/s |" in full
        assert "| full | fp32 | 2.00 (2.00\u20132.00) |" in full
        assert "| small | Q4_K_M | 0.10 (0.10\u20130.10), 60.0 tok/s |" in reduced
        assert "| small | Q4_K_M | 0.50 (0.50\u20130.50) |" in reduced
        assert "small" not in full

    def test_plot(self, fake, tmp_path, figures):
        engines = [fake("ours"), fake("broken", trouble="dies"), fake("small", pace=0.3, precision="int8")]
        comparison = run(engines, [FEW, MANY], num_rounds=3)
        plot_comparison(comparison, tmp_path / "plot.png")
        (figure,) = figures
        assert figure.saved == [tmp_path / "plot.png"]
        few, many = figure.panels
        assert few.title == "few: 2 x (5 in, 3 out)"
        assert many.title == "many: 40 x (3000 shared + 7 in, 2 out)"
        assert few.labels == ["ours (fp32)", "broken (fp32)", "small (int8)"]
        # Medians with the distances to the least and the most: rounds take 0.2, 0.4, 0.6 and 0.6, 1.2, 1.8 s.
        assert few.bars == {0: pytest.approx([0.4, 0.2, 0.2]), 2: pytest.approx([1.2, 0.6, 0.6])}
        assert many.bars == {0: pytest.approx([8.0, 4.0, 4.0]), 2: pytest.approx([24.0, 12.0, 12.0])}

    def test_plot_checks_its_path(self, fake, tmp_path):
        with pytest.raises(ConfigError, match=r"give a name that ends in \.png"):
            plot_comparison(run([fake("ours")]), tmp_path / "plot.svg")


class RecordingPanel:
    """Takes what is drawn; methods that do not matter here do nothing."""

    def __init__(self):
        self.bars, self.title, self.labels = {}, None, None

    def barh(self, row, width, *, xerr, **style):
        self.bars[row] = [width, *xerr[0], *xerr[1]]

    def set_title(self, title, **style):
        self.title = title

    def set_yticks(self, ticks, labels):
        self.labels = labels

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.fixture
def figures(monkeypatch):
    """A stand-in for matplotlib; the figures that are made."""
    made = []

    class Figure:
        def __init__(self, **options):
            self.saved = []
            made.append(self)

        def subplots(self, num_rows, num_columns, **options):
            self.panels = [RecordingPanel() for _ in range(num_columns)]
            return [self.panels]

        def savefig(self, path, **options):
            self.saved.append(path)

    package = types.ModuleType("matplotlib")
    package.figure = types.SimpleNamespace(Figure=Figure)
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", package.figure)
    return made


class TestWire:
    """The protocol that the real drivers share, with an engine of three lines."""

    def test_what_an_engine_prints_does_not_mix_with_the_answers(self, tmp_path):
        script = tmp_path / "driver.py"
        script.write_text(
            "import os, sys\n"
            f"sys.path.insert(0, {str(DRIVERS)!r})\n"
            "from wire import serve\n"
            "def load(settings):\n"
            "    print('loading', flush=True)\n"
            "    def generate(prompts, output_tokens, shared_tokens):\n"
            "        os.write(1, b'generating')\n"
            "        return [tuple(prompt[-1:]) * output_tokens for prompt in prompts]\n"
            "    return generate, {'from': settings['model']}\n"
            "serve(load, ('pytest', 'no-such-package'))\n"
        )
        with Worker("wired", (sys.executable, str(script)), dict(os.environ), timeout_seconds=60.0) as worker:
            loaded = worker.ask({"load": {"model": "m"}}, "loading")
            answer = worker.ask({"prompts": [[1, 2], [3, 4]], "output_tokens": 3, "shared_tokens": 0}, "running")
        assert loaded["settings"] == {"from": "m"}
        assert loaded["versions"]["pytest"] == pytest.__version__
        assert "no-such-package" not in loaded["versions"]
        assert answer["output_token_ids"] == [[2, 2, 2], [4, 4, 4]]
        assert 0 < answer["seconds"] < 60
        assert worker._process.returncode == 0

    @pytest.mark.parametrize("path", sorted(DRIVERS.glob("*.py")), ids=lambda path: path.stem)
    def test_drivers_for_other_interpreters_import_nothing_of_lamella(self, path):
        imports = [
            line.split()[1] for line in path.read_text().splitlines() if line.strip().startswith(("import ", "from "))
        ]
        is_ours = path.stem == "lamella_driver"
        assert any(name.split(".")[0] == "lamella" for name in imports) == is_ours
