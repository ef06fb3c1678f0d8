"""The replay benchmark: memory, systems, and runs whose figures are known by hand."""

from dataclasses import replace

import pytest

from kv_replay import drive
from kv_replay.layouts import full_token_bytes, layer_specs
from kv_replay.replay_table import ReplayTable, budget_in_bytes, replay_jobs
from kv_replay.results import Measurements, Refusal
from kv_replay.systems import Limits, System, build_scheduler, parse_system
from kv_replay.traces import TraceRequest, load_trace
from lamella.errors import CapacityError, ConfigError
from tests.helpers.trace_files import agentic, write_two_sessions

LAMELLA = System("lamella")
GPT_OSS_PAGE_BYTES = 16 * 12 * 8 * (64 + 64) * 2  # of either group: 12 layers, 8 heads, bf16


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
    assert [parse_system(name).name for name in ("lamella", "hinted", "split:0.8", "hybrid-off", "vllm:4096")] == [
        "lamella", "hinted", "split:0.8", "hybrid-off", "vllm:4096",
    ]  # fmt: skip
    for name in ("split", "split:0", "split:x", "lamella:2", "sglang"):
        with pytest.raises(ConfigError, match="use lamella, hinted, split:RATIO"):
            parse_system(name)


# Runs


def replay(system, trace_dir, *, num_sessions, budget, **limits):
    table = ReplayTable(
        traces=("agentic",), trace_dir=str(trace_dir), num_requests=100, num_sessions=num_sessions,
        layouts=("gpt-oss-20b",), budgets=(budget,), systems=(system,), variants=(Limits(**limits),),
    )  # fmt: skip
    (job,) = replay_jobs(table)
    return job().outcome


@pytest.fixture
def two_sessions(tmp_path):
    write_two_sessions(tmp_path)
    return tmp_path


@pytest.mark.parametrize("system", [LAMELLA, System("hybrid-off"), System("split", 1.0)], ids=lambda one: one.name)
def test_a_run_known_by_hand(two_sessions, system):
    outcome = replay(system, two_sessions, num_sessions=2, budget=100)
    # Each second turn finds the 351 tokens of the first that were computed: its last output token never was.
    assert outcome.num_prompt_tokens == 2 * (320 + 384)
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
    # Of elastic memory 1/96 is for step pages.
    elastic = replay(LAMELLA, two_sessions, num_sessions=2, budget=100)
    split = replay(System("split", 1.0), two_sessions, num_sessions=2, budget=100)
    assert 1 / 96 - 0.001 < elastic.unusable_bytes_share < 1 / 96 + 0.01
    assert 0.4 < split.unusable_bytes_share < 0.55


def test_window_bytes_held_beside_the_ideal():
    # Nothing slides out of 128 tokens. Two pages for the prompt's 32 tokens, then three for 33 and 34. The ideal of a
    # prefill is what its first token sees.
    request = TraceRequest("r0", "r0", 32, 3, (), 16, "r0")
    scheduler = build_scheduler(LAMELLA, layer_specs("gpt-oss-20b"), Limits(), budget_bytes=2**28, max_model_len=48)
    outcome = drive.replay(scheduler, [request], num_sessions=1, budget_bytes=2**28)
    assert outcome.steps == 3
    assert outcome.windowed_bytes_mean == pytest.approx((2 + 3 + 3) * GPT_OSS_PAGE_BYTES / 3)
    assert outcome.windowed_held_over_ideal == pytest.approx((2 + 3 + 3) * 16 / (1 + 33 + 34))
    assert outcome.peak_bytes["sliding_128"] == 3 * GPT_OSS_PAGE_BYTES


def test_the_interval_that_a_fixed_pool_allows_is_told(two_sessions):
    # Windows of 128 tokens in a pool that holds 400 * 0.5 tokens and a little: 128 + 512 do not fit.
    outcome = replay(System("split", 0.5), two_sessions, num_sessions=1, budget=1.8, interval_tokens=512)
    assert 16 <= outcome.used_interval_tokens < 128
    assert replay(LAMELLA, two_sessions, num_sessions=1, budget=100, interval_tokens=512).used_interval_tokens == 512


def test_pure_decode_counts_decode_steps_alone():
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=4)
    specs = layer_specs("gpt-oss-20b")
    scheduler = build_scheduler(LAMELLA, specs, limits, budget_bytes=2**30, max_model_len=512)
    outcome = drive.decode_only(scheduler, num_requests=4, context_tokens=200, num_steps=20, budget_bytes=2**30)
    assert (outcome.steps, outcome.mean_running, outcome.max_running) == (20, 4.0, 4)
    assert outcome.prefill_tokens_computed == 4 * 200
    assert outcome.hit_share == 0
    assert 0 < outcome.host_us_per_step_min <= outcome.host_us_per_step_p50


def test_prompts_are_taken_in_alone_and_whole():
    limits = Limits(max_num_batched_tokens=200, max_num_seqs=4)
    specs = layer_specs("gpt-oss-20b")
    scheduler = build_scheduler(LAMELLA, specs, limits, budget_bytes=2**30, max_model_len=208)
    cost = drive.prompt_cost(scheduler, num_prompt_tokens=200, num_prompts=5, budget_bytes=2**30)
    counters = scheduler.counters()
    # Two steps each: the one that is timed and the one that ends the request.
    assert (counters.num_steps, counters.num_prompt_tokens, counters.num_cached_tokens) == (2 * 5, 5 * 200, 0)
    assert not scheduler.has_requests
    assert cost.prompts == 5
    assert 0 < max(cost.add_us_p50, cost.schedule_us_p50, cost.update_us_p50) < cost.total_us_p50
    assert 0 < cost.cache_us_p50 < cost.schedule_us_p50 + cost.update_us_p50
    beside = build_scheduler(LAMELLA, specs, limits, budget_bytes=2**30, max_model_len=208)
    cost = drive.prompt_cost(beside, num_prompt_tokens=200, num_prompts=5, num_siblings=7, budget_bytes=2**30)
    # All but the first sibling find the one token that all begin with.
    assert (cost.prompts, beside.counters().num_cached_tokens) == (5, 6 + 5)
    smaller = build_scheduler(LAMELLA, specs, replace(limits, max_num_batched_tokens=64), budget_bytes=2**30,
                              max_model_len=208)  # fmt: skip
    with pytest.raises(CapacityError, match="64 of a prompt's 200 tokens"):
        drive.prompt_cost(smaller, num_prompt_tokens=200, num_prompts=5, budget_bytes=2**30)
