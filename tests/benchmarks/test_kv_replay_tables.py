"""The replay benchmark's tables, what vLLM is given, and the command."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kv_replay.host_table import DecodeSizes, HostTable, PromptSizes, decode_jobs, prompt_jobs
from kv_replay.jobs import run_jobs
from kv_replay.replay_table import ReplayTable, replay_jobs
from kv_replay.results import PromptCost, Refusal
from kv_replay.systems import Limits, System
from kv_replay.traces import load_trace, token_ids
from tests.helpers.trace_files import mooncake, write_two_sessions

COMMAND = Path(__file__).parents[2] / "benchmarks" / "benchmark_kv_replay.py"
LAMELLA = System("lamella")
DEFAULT_LIMITS = (Limits(),)


@pytest.fixture
def two_sessions(tmp_path):
    write_two_sessions(tmp_path)
    return tmp_path


def table_of(
    trace_dir, *systems, num_sessions=2, budgets=(100,), layout="gpt-oss-20b", variants=DEFAULT_LIMITS, **more
):
    return ReplayTable(
        traces=("agentic",), trace_dir=str(trace_dir), num_requests=100, num_sessions=num_sessions, layouts=(layout,),
        budgets=budgets, systems=systems, variants=variants, **more,
    )  # fmt: skip


def cells_of(jobs):
    return [result.cell for result in run_jobs(jobs)]


def test_repeats_take_turns():
    table = HostTable(repeats=2, layouts=("gpt-oss-20b",), systems=(LAMELLA, System("hybrid-off")),
                      variants=(Limits(max_num_seqs=1), Limits(max_num_seqs=1, interval_tokens=32)))  # fmt: skip
    jobs = decode_jobs(table, DecodeSizes(num_requests=1, context_tokens=16, num_steps=2))
    one_turn = [("lamella", 16), ("lamella", 32), ("hybrid-off", 16), ("hybrid-off", 32)]
    assert [(cell.repeat, cell.system, cell.interval_tokens) for cell in cells_of(jobs)] == [
        (repeat, *run) for repeat in (0, 1) for run in one_turn
    ]


def test_a_step_has_room_for_the_prompts_whose_cost_is_measured():
    table = HostTable(layouts=("gpt-oss-20b",), systems=(LAMELLA,), variants=(Limits(max_num_batched_tokens=64),))
    (job,) = prompt_jobs(table, PromptSizes(num_prompt_tokens=300, num_prompts=2))
    result = job()
    assert isinstance(result.outcome, PromptCost)
    assert (result.cell.trace, result.outcome.prompts) == ("prompts of 300", 2)


WITHOUT_TIMES = {
    "host_us_per_step_p50": 0.0,
    "host_us_per_step_min": 0.0,
    "host_us_per_step_mean": 0.0,
    "add_us_p50": 0.0,
}


def test_processes_change_no_figure_but_times(two_sessions):
    jobs = replay_jobs(table_of(two_sessions, LAMELLA, System("hybrid-off"), budgets=(2, 100)))
    alone, together = list(run_jobs(jobs)), list(run_jobs(jobs, num_processes=2))
    assert [result.cell for result in together] == [result.cell for result in alone]
    assert [isinstance(result.outcome, Refusal) for result in alone] == [False, True, False, False]
    for one, other in zip(alone, together, strict=True):
        if isinstance(one.outcome, Refusal):
            assert other.outcome == one.outcome
        else:
            assert replace(other.outcome, **WITHOUT_TIMES) == replace(one.outcome, **WITHOUT_TIMES)


STAND_IN = """#!{python}
import json, sys
job = json.load(open(sys.argv[2]))
assert sys.argv[1].endswith("vllm_driver.py")
json.dump(job, open("{folder}/job.json", "w"))
answer = json.load(open("{folder}/answer.json"))
json.dump(answer, open(sys.argv[3], "w"))
"""


def stand_in_for_vllm(folder, answer):
    """An interpreter that keeps the job it is given in job.json, and answers."""
    path = folder / "python-with-vllm"
    path.write_text(STAND_IN.format(python=sys.executable, folder=folder))
    path.chmod(0o755)
    (folder / "answer.json").write_text(json.dumps(answer))
    return str(path)


def test_vllm_gets_the_same_job_once_under_its_own_policy(two_sessions, tmp_path):
    python = stand_in_for_vllm(tmp_path, {"refused": "too small"})
    variants = tuple(
        Limits(policy=policy, interval_tokens=interval, max_num_batched_tokens=512)
        for policy in ("prefix", "fcfs")
        for interval in (16, 64)
    )
    table = table_of(two_sessions, LAMELLA, System("vllm"), variants=variants, vllm_python=python)
    results = [job() for job in replay_jobs(table)]
    assert [(one.cell.system, one.cell.policy, one.cell.interval_tokens) for one in results] == [
        ("lamella", "prefix", 16), ("lamella", "prefix", 64), ("lamella", "fcfs", 16), ("lamella", "fcfs", 64),
        ("vllm", "fcfs", None),
    ]  # fmt: skip
    assert results[-1].outcome == Refusal("too small")
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["budget_bytes"] == results[0].cell.budget_bytes
    sizes = {name: job[name] for name in ("page_tokens", "max_num_seqs", "max_num_batched_tokens", "num_sessions")}
    assert sizes == {"page_tokens": 16, "max_num_seqs": 256, "max_num_batched_tokens": 512, "num_sessions": 2}
    assert [layer["window_tokens"] for layer in job["layers"]] == [128, None] * 12
    requests = load_trace("agentic", two_sessions, num_requests=4)
    assert [(turn["id"], turn["prompt"], turn["output"]) for turn in job["turns"]] == [
        (request.request_id, *(ids.tolist() for ids in token_ids(request))) for request in requests
    ]


def test_vllm_s_prompt_times_are_read_like_lamella_s(tmp_path):
    seconds = [[3e-6, 5e-6, 1e-6], [1e-6, 9e-6, 2e-6], [2e-6, 1e-6, 3e-6]]
    python = stand_in_for_vllm(tmp_path, {"prompt_seconds": seconds})
    table = HostTable(layouts=("gpt-oss-20b",), systems=(System("vllm"),), variants=(Limits(),), vllm_python=python)
    (job,) = prompt_jobs(table, PromptSizes(num_prompt_tokens=10_000))
    cost = job().outcome
    parts = (cost.add_us_p50, cost.schedule_us_p50, cost.update_us_p50)
    # Totals are 9, 12 and 6.
    assert (cost.prompts, *parts, cost.total_us_p50, cost.total_us_min) == pytest.approx((3, 2, 5, 2, 9, 6))
    asked = json.loads((tmp_path / "job.json").read_text())
    assert asked["prompt_cost"].items() >= {"num_prompt_tokens": 10_000, "num_prompts": 20, "num_siblings": 0}.items()
    assert asked["prompt_cost"]["num_output_tokens"] == 2
    assert asked["max_num_batched_tokens"] == 10_000


# The command


def invoke(*arguments):
    return CliRunner().invoke(runpy.run_path(str(COMMAND))["main"], arguments)


def test_command(two_sessions, tmp_path):
    json_file = tmp_path / "results.json"
    arguments = ["--trace-dir", str(two_sessions), "--requests", "4", "--sessions", "2", "--layout", "gpt-oss-20b",
                 "--budget-requests", "1.5", "--budget-requests", "50", "--systems", "lamella,hybrid-off",
                 "--output-json", str(json_file)]  # fmt: skip
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    objects = json.loads(json_file.read_text())
    assert [(one["budget_requests"], one["system"], one["interval_tokens"]) for one in objects] == [
        (1.5, "lamella", 16), (1.5, "hybrid-off", 16), (50.0, "lamella", 16), (50.0, "hybrid-off", 16),
    ]  # fmt: skip
    assert "refused" in objects[1]
    keys = {
        "hit_share", "prefill_tokens_computed", "steps", "mean_running", "max_running", "preemptions",
        "host_us_per_step_p50", "host_us_per_step_min", "peak_bytes", "unusable_bytes_share", "num_prompt_tokens",
        "add_us_p50",
    }  # fmt: skip
    assert keys <= objects[2].keys()
    rows = [line.split(" | ")[2:4] for line in result.stdout.splitlines()[2:6]]
    assert rows == [["x1.5", "lamella"], ["x1.5", "hybrid-off"], ["x50", "lamella"], ["x50", "hybrid-off"]]
    assert "hybrid-off refused agentic, gpt-oss-20b, x1.5." in result.stdout
    skipped = invoke(*arguments, "--skip-requests", "4")
    assert skipped.exit_code == 1
    assert "has no request after the first 4" in skipped.stderr
    without = invoke("--systems", "vllm", *arguments[:2])
    assert without.exit_code == 1
    assert "give the one that has vLLM as vllm_python" in without.stderr


def test_command_runs_every_combination_once(two_sessions, tmp_path):
    mooncake(two_sessions, [(100, 2, [1]), (120, 2, [2])])
    json_file = tmp_path / "results.json"
    result = invoke(
        "--trace", "agentic", "--trace", "conversation", "--trace", "agentic", "--trace-dir", str(two_sessions),
        "--policy", "fcfs", "--policy", "prefix", "--interval", "16", "--interval", "32",
        "--output-json", str(json_file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    objects = json.loads(json_file.read_text())
    assert [(one["trace"], one["policy"], one["interval_tokens"]) for one in objects] == [
        (trace, policy, interval)
        for trace in ("agentic", "conversation")
        for policy in ("fcfs", "prefix")
        for interval in (16, 32)
    ]
    assert "Waiting" in result.stdout
    assert "Eviction intervals" in result.stdout


def test_command_measures_host_time(tmp_path):
    json_file = tmp_path / "results.json"
    decode = invoke("--decode-only", "2", "--context", "40", "--steps", "3", "--repeats", "2", "--output-json",
                    str(json_file))  # fmt: skip
    assert decode.exit_code == 0, decode.output
    assert [(one["steps"], one["repeat"]) for one in json.loads(json_file.read_text())] == [(3, 0), (3, 1)]
    assert "| decode 2 x 40 | gpt-oss-20b | lamella | 16 | 2 |" in decode.stdout
    prompts = invoke("--prompt-cost", "100")
    assert prompts.exit_code == 0, prompts.output
    assert "| prompts of 100 | gpt-oss-20b | lamella | 16 | 1 |" in prompts.stdout
    beside = invoke("--prompt-cost", "100", "--siblings", "5", "--siblings", "30")
    assert beside.exit_code == 0, beside.output
    for count in (5, 30):
        assert f"| prompts of 100 beside {count} | gpt-oss-20b | lamella | 16 | 1 |" in beside.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode-only", "2", "--prompt-cost", "100"], "give one of them"),
        ([], "--trace-dir is needed"),
        (["--trace-dir", ".", "--repeats", "2"], "--repeats is for"),
        (["--prompt-cost", "100", "--jobs", "2"], "--jobs is for replays"),
        (["--decode-only", "2", "--siblings", "100"], "--siblings is for --prompt-cost"),
        (["--decode-only", "2", "--plot", "x.png"], "--plot is for replays"),
    ],
)
def test_options_that_do_not_go_together(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
