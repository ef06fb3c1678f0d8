"""The replay benchmark: traces as tokens, sessions in their order, and figures that are known by hand."""

import gzip
import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lamella.benchmark.kv_replay import drive
from lamella.benchmark.kv_replay.closed_loop import ClosedLoop
from lamella.benchmark.kv_replay.layouts import full_token_bytes, layer_specs
from lamella.benchmark.kv_replay.results import Measurements, Refusal
from lamella.benchmark.kv_replay.systems import Limits, System, build_scheduler, parse_system
from lamella.benchmark.kv_replay.table import ReplayTable, budget_in_bytes, run_replays
from lamella.benchmark.kv_replay.traces import TraceRequest, load_trace, token_ids
from lamella.errors import ConfigError

COMMAND = Path(__file__).parents[2] / "benchmarks" / "benchmark_kv_replay.py"
LAMELLA = System("lamella")
GPT_OSS_PAGE_BYTES = 16 * 12 * 8 * (64 + 64) * 2  # of either group: 12 layers, 8 heads, bf16


def write_lines(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def agentic(folder, conversations):
    """conversations: id -> [(prompt tokens, output tokens, hash ids)], spans of 16 tokens."""
    rows = [
        {
            "id": name,
            "block_size": 16,
            "requests": [
                {"t": float(index), "in": num_in, "out": num_out, "hash_ids": ids}
                for index, (num_in, num_out, ids) in enumerate(turns)
            ],
        }
        for name, turns in conversations.items()
    ]
    write_lines(folder / "weka_agentic_sample.jsonl.gz", rows)


def mooncake(folder, rows):
    """rows: (prompt tokens, output tokens, hash ids)."""
    write_lines(
        folder / "mooncake_conversation_trace.jsonl.gz",
        [
            {"timestamp": index, "input_length": num_in, "output_length": num_out, "hash_ids": ids}
            for index, (num_in, num_out, ids) in enumerate(rows)
        ],
    )


def common_prefix(first, second):
    length = min(len(first), len(second))
    same = first[:length] == second[:length]
    return length if same.all() else int(same.argmin())


def all_tokens(request):
    return np.concatenate(token_ids(request))


# Traces


def test_equal_hash_ids_are_equal_tokens_and_all_else_differs(tmp_path):
    agentic(tmp_path, {"a": [(40, 3, [1, 2, 3]), (48, 3, [1, 2, 9])], "b": [(40, 3, [1, 2, 3]), (40, 3, [1, 2, 3])]})
    first, second, other, again = load_trace("agentic", tmp_path, num_requests=4)
    # Two spans of 16 are shared within a session; another session's ids name other tokens.
    assert common_prefix(token_ids(first)[0], token_ids(second)[0]) == 32
    assert common_prefix(token_ids(first)[0], token_ids(other)[0]) == 0
    assert np.array_equal(token_ids(other)[0], token_ids(again)[0])
    for request, num_in in ((first, 40), (second, 48), (other, 40), (again, 40)):
        prompt, output = token_ids(request)
        assert (len(prompt), len(output), prompt.dtype, output.dtype) == (num_in, 3, np.int32, np.int32)
        assert prompt.min() >= 0
        assert prompt.max() < 200_000
    # Outputs that nothing continues are nobody else's.
    assert not set(token_ids(other)[1]) & set(token_ids(again)[1])


def test_token_ids_do_not_change_from_version_to_version(tmp_path):
    # Figures are comparable only while these stay.
    agentic(tmp_path, {"a": [(16, 1, [1]), (16, 1, [2])]})
    first = token_ids(load_trace("agentic", tmp_path, num_requests=1)[0])[0]
    assert first.tolist() == expected_span(b"a/1")


def expected_span(name):
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")
    return [(((seed + index) * 0x9E3779B97F4A7C15) % 2**64 >> 40) % 200_000 for index in range(16)]


def test_a_turn_s_end_and_output_are_what_the_next_turn_s_prompt_says(tmp_path):
    # Turn one: two named spans, 8 tokens more, 10 of output: 50 in all. Turn two names 48 tokens.
    agentic(tmp_path, {"a": [(40, 10, [1, 2]), (60, 4, [1, 2, 3])]})
    first, second = load_trace("agentic", tmp_path, num_requests=2)
    assert first.continued_by is second
    assert common_prefix(all_tokens(first), token_ids(second)[0]) == 48
    assert len(all_tokens(first)) == 50
    # Cutting the trace between them changes no token.
    (alone,) = load_trace("agentic", tmp_path, num_requests=1)
    assert np.array_equal(all_tokens(alone), all_tokens(first))


def test_conversations_are_linked_only_where_asked_for(tmp_path):
    # 1,100 tokens are two whole spans of 512 and a part, whose id 3 the later, longer prompt does not have.
    mooncake(tmp_path, [(1100, 100, [1, 2, 3]), (600, 5, [1, 7]), (1500, 50, [1, 2, 8])])
    plain = load_trace("conversation", tmp_path, num_requests=3)
    assert common_prefix(token_ids(plain[0])[0], token_ids(plain[2])[0]) == 1024
    linked = load_trace("conversation-cont", tmp_path, num_requests=3)
    assert linked[0].continued_by is linked[2]
    assert common_prefix(all_tokens(linked[0]), token_ids(linked[2])[0]) == 1200
    assert [request.continued_by for request in linked[1:]] == [None, None]
    assert len({request.session for request in linked}) == 3


def test_scale_and_limit(tmp_path):
    turns = [(64, 8, [1, 2, 3, 4]), (80, 8, [1, 2, 3, 4, 5]), (200, 8, [1, 2, 3, 4, 5, 6]), (90, 8, [1])]
    agentic(tmp_path, {"a": turns, "one turn only": [(64, 8, [1])], "b": turns})
    requests = load_trace("agentic", tmp_path, num_requests=9, scale=0.25, max_total_tokens=30)
    # The third turn, 52 tokens after scaling, ends its session.
    assert [(r.session, r.num_prompt_tokens, r.num_output_tokens, r.span_tokens) for r in requests] == [
        ("a", 16, 2, 4), ("a", 20, 2, 4), ("b", 16, 2, 4), ("b", 20, 2, 4),
    ]  # fmt: skip
    assert common_prefix(token_ids(requests[0])[0], token_ids(requests[1])[0]) == 16
    mooncake(tmp_path, [(100, 1, [1]), (9000, 1, [2]), (50, 1, [3])])
    kept = load_trace("conversation", tmp_path, num_requests=9, max_total_tokens=500)
    assert [request.num_prompt_tokens for request in kept] == [100, 50]


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose one of agentic, conversation"):
        load_trace("chat", tmp_path, num_requests=1)
    with pytest.raises(ConfigError, match=r"mooncake_synthetic_trace\.jsonl\.gz, which does not exist"):
        load_trace("synthetic", tmp_path, num_requests=1)
    agentic(tmp_path, {"a": [(16, 1, [1]), (16, 1, [2])]})
    with pytest.raises(ConfigError, match="leaves nothing of spans of 16 tokens"):
        load_trace("agentic", tmp_path, num_requests=1, scale=0.05)


# Sessions


def turn(name):
    return TraceRequest(name, name[0], 1, 1, (), 16, name[0])


def test_closed_loop_sends_a_turn_when_its_session_s_last_one_is_answered():
    turns = {name: turn(name) for name in ("a1", "a2", "b1", "b2", "c1", "d1")}
    loop = ClosedLoop(turns.values(), num_sessions=2)
    assert [one.request_id for one in loop.start()] == ["a1", "b1"]
    answered = ["b1", "b2", "a1", "c1", "a2", "d1"]
    arrivals = [loop.answer(turns[name]) for name in answered]
    # b's second turn; c in b's place; a's second; d in c's place; then nobody is left.
    assert [one and one.request_id for one in arrivals] == ["b2", "c1", "a2", "d1", None, None]


# Memory


@pytest.mark.parametrize(
    ("layout", "kinds", "full_bytes"),
    [
        # K and V of all full layers: layers * heads * (K dim + V dim) * 2 bytes
        ("gpt-oss-20b", {0: 12, 128: 12}, 12 * 8 * 128 * 2),
        ("gemma-3-27b", {0: 10, 1024: 52}, 10 * 16 * 256 * 2),
        ("mimo-v2-flash", {0: 9, 128: 39}, 9 * 4 * 320 * 2),
        ("gemma-3-270m", {0: 3, 512: 15}, 3 * 1 * 512 * 2),
    ],
)
def test_layouts(layout, kinds, full_bytes):
    specs = layer_specs(layout)
    windows = [getattr(spec, "window_tokens", 0) for spec in specs]
    assert {window: windows.count(window) for window in set(windows)} == kinds
    assert full_token_bytes(specs) == full_bytes


def test_budget_is_full_attention_kv_of_mean_requests(tmp_path):
    agentic(tmp_path, {"a": [(90, 10, [1]), (180, 20, [1])]})
    requests = load_trace("agentic", tmp_path, num_requests=2)
    # 150 tokens on average, 12 full layers of 8 heads.
    assert budget_in_bytes(8, requests, layer_specs("gpt-oss-20b")) == 8 * 150 * 12 * 8 * 128 * 2


def test_system_names():
    assert [parse_system(name).name for name in ("lamella", "split:0.8", "hybrid-off", "vllm:4096")] == [
        "lamella", "split:0.8", "hybrid-off", "vllm:4096",
    ]  # fmt: skip
    for name in ("split", "split:0", "split:x", "lamella:2", "sglang"):
        with pytest.raises(ConfigError, match="use lamella, split:RATIO"):
            parse_system(name)


# Runs


def replay(system, trace_dir, *, num_sessions, budget, layout="gpt-oss-20b", **limits):
    table = ReplayTable(
        trace="agentic",
        trace_dir=str(trace_dir),
        num_requests=100,
        num_sessions=num_sessions,
        layouts=(layout,),
        budgets=(budget,),
        systems=(system,),
        limits=Limits(**limits),
    )
    (result,) = run_replays(table)
    return result.outcome


@pytest.fixture
def two_sessions(tmp_path):
    # 20 spans of 16 tokens and 32 of output, which the second turn has in its prompt of 24 spans.
    turns = [(320, 32, list(range(20))), (384, 16, list(range(24)))]
    agentic(tmp_path, {"a": turns, "b": turns})
    return tmp_path


@pytest.mark.parametrize("system", [LAMELLA, System("hybrid-off"), System("split", 1.0)], ids=lambda one: one.name)
def test_a_run_known_by_hand(two_sessions, system):
    outcome = replay(system, two_sessions, num_sessions=2, budget=100)
    # Each second turn finds the 351 tokens of the first that were computed: its last output token never was.
    assert outcome.hit_share == pytest.approx(2 * 351 / (2 * (320 + 384)))
    assert outcome.prefill_tokens_computed == 2 * (320 + 384 - 351)
    # Both prompts fit into one chunk, so both sessions keep step: 32 tokens, then 16.
    assert outcome.steps == 32 + 16
    assert (outcome.mean_running, outcome.max_running, outcome.preemptions) == (2.0, 2, 0)
    assert (outcome.wait_steps_p50, outcome.wait_steps_max) == (0, 0)
    # 399 tokens are 25 blocks; hybrid-off has one group of all layers.
    full_pages = 2 * 25 * (2 if system.kind == "hybrid-off" else 1)
    assert outcome.peak_bytes["full"] == full_pages * GPT_OSS_PAGE_BYTES
    if system.kind != "hybrid-off":
        # The chunk of the first step: the sliding group holds it whole.
        assert outcome.peak_bytes["sliding_128"] == 2 * 20 * GPT_OSS_PAGE_BYTES


def test_one_session_at_a_time_waits_and_takes_twice_the_steps(two_sessions):
    outcome = replay(LAMELLA, two_sessions, num_sessions=1, budget=100)
    assert (outcome.steps, outcome.mean_running) == (2 * (32 + 16), 1.0)
    crowded = replay(LAMELLA, two_sessions, num_sessions=2, budget=100, max_num_seqs=1)
    # One row: b's first turn waits for a's (32 steps), a's second for b's first (32), b's second for that (16).
    assert (crowded.steps, crowded.max_running) == (2 * (32 + 16), 1)
    assert (crowded.wait_steps_p50, crowded.wait_steps_max) == (24.0, 32)


def test_recompute_counts_as_prefill_but_not_as_a_miss(tmp_path):
    # 30 pages for two requests that grow from 10 to 23 each: at 15 each, 240 tokens computed and 81 tokens put out,
    # the younger leaves. The older takes 8 of its cached pages and ends after 200 steps; the younger resumes on the
    # other 7, computes 128 tokens again, and has 119 to go. Its session's second turn is one step more.
    turns = [(160, 200, list(range(10))), (161, 1, [99])]
    agentic(tmp_path, {"a": turns, "b": [(160, 200, list(range(50, 60))), (161, 1, [98])]})
    requests = load_trace("agentic", tmp_path, num_requests=4)
    specs = [spec for spec in layer_specs("gpt-oss-20b") if not spec.is_windowed]
    limits = Limits(interval_tokens=16)
    budget_bytes = (1 + 30) * GPT_OSS_PAGE_BYTES
    scheduler = build_scheduler(LAMELLA, specs, limits, budget_bytes=budget_bytes, max_model_len=368)
    outcome = drive.replay(scheduler, requests, num_sessions=2, budget_bytes=budget_bytes)
    assert (outcome.preemptions, outcome.hit_share) == (1, 0)
    assert outcome.prefill_tokens_computed == 2 * (160 + 161) + 128
    assert outcome.steps == 200 + 119 + 1


def test_requests_that_do_not_fit_are_a_refusal(two_sessions):
    outcome = replay(System("hybrid-off"), two_sessions, num_sessions=2, budget=1.5)
    assert isinstance(outcome, Refusal)
    assert "one request of max_model_len=400 tokens needs" in outcome.refused
    assert isinstance(replay(LAMELLA, two_sessions, num_sessions=2, budget=2), Measurements)


def test_unusable_bytes_of_fixed_pools(two_sessions):
    # With r = 1 the pools are equal and the sliding one is nearly idle: what it has is of no use to the full group.
    elastic = replay(LAMELLA, two_sessions, num_sessions=2, budget=100)
    split = replay(System("split", 1.0), two_sessions, num_sessions=2, budget=100)
    assert elastic.unusable_bytes_share < 0.01
    assert 0.4 < split.unusable_bytes_share < 0.55


def test_pure_decode_counts_decode_steps_alone():
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=4)
    specs = layer_specs("gpt-oss-20b")
    scheduler = build_scheduler(LAMELLA, specs, limits, budget_bytes=2**30, max_model_len=512)
    outcome = drive.decode_only(scheduler, num_requests=4, context_tokens=200, num_steps=20, budget_bytes=2**30)
    assert (outcome.steps, outcome.mean_running, outcome.max_running) == (20, 4.0, 4)
    assert outcome.prefill_tokens_computed == 4 * 200
    assert outcome.hit_share == 0
    assert 0 < outcome.host_us_per_step_min <= outcome.host_us_per_step_p50


def test_command(two_sessions, tmp_path):
    main = runpy.run_path(str(COMMAND))["main"]
    json_file = tmp_path / "results.json"
    arguments = ["--trace-dir", str(two_sessions), "--requests", "4", "--sessions", "2", "--layout", "gpt-oss-20b",
                 "--budget-requests", "1.5", "--budget-requests", "50", "--systems", "lamella,hybrid-off",
                 "--output-json", str(json_file)]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    objects = json.loads(json_file.read_text())
    assert [(one["budget_requests"], one["system"]) for one in objects] == [
        (1.5, "lamella"), (1.5, "hybrid-off"), (50.0, "lamella"), (50.0, "hybrid-off"),
    ]  # fmt: skip
    assert "refused" in objects[1]
    keys = {
        "hit_share", "prefill_tokens_computed", "steps", "mean_running", "max_running", "preemptions",
        "host_us_per_step_p50", "host_us_per_step_min", "peak_bytes", "unusable_bytes_share",
    }  # fmt: skip
    assert keys <= objects[2].keys()
    rows = [line.split(" | ")[:3] for line in result.stdout.splitlines()[2:]]
    assert [row[1:] for row in rows] == [["x1.5", "lamella"], ["x1.5", "hybrid-off"], ["x50", "lamella"],
                                         ["x50", "hybrid-off"]]  # fmt: skip
    skipped = CliRunner().invoke(main, [*arguments, "--skip-requests", "4"])
    assert skipped.exit_code == 1
    assert "has no request after the first 4" in skipped.stderr
    without = CliRunner().invoke(main, ["--systems", "vllm", *arguments[:2]])
    assert without.exit_code == 1
    assert "give the one that has vLLM as vllm_python" in without.stderr
