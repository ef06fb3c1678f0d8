"""Simulated replicas: times and hits that are counted by hand, and a cost model whose coefficients are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import benchmark_replicas
from kv_replay.capacity_plan import Choice, Target, cheapest, fewest_replicas
from kv_replay.drive import known_request
from kv_replay.layouts import layer_specs
from kv_replay.replica_routing import LEAST_LOADED, POLICIES, PREFIX, ROUND_ROBIN, SUBTREES
from kv_replay.simulated_replicas import CLOSED, QUEUED, TIMED, Cluster, Percentiles, Traffic, simulate
from kv_replay.step_cost_model import MeasuredStep, StepCostModel, StepSize, fit_and_check, read_steps, write_steps
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import TraceRequest
from lamella.errors import CapacityError, ConfigError
from tests.helpers.trace_files import write_two_sessions

SPAN_TOKENS = 16
AMPLE_BYTES = 64 << 20
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512)
KNOWN = StepCostModel(step=4e-3, token=3e-5, request=2e-4, kv_token=7e-7, attended_token=2e-9)


def cluster(num_replicas, *, costs=KNOWN, limits=LIMITS, budget_bytes=AMPLE_BYTES):
    return Cluster(
        num_replicas=num_replicas, layout="gemma-3-270m", budget_bytes=budget_bytes, limits=limits, costs=costs
    )


def turn(name, scope, num_spans, num_output, seconds=0.0):
    ids = tuple(range(num_spans))
    return TraceRequest(
        name, scope, num_spans * SPAN_TOKENS, num_output, ids, SPAN_TOKENS, scope, arrival_seconds=seconds
    )


def random_steps(num_steps, costs, noise=0.0):
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(num_steps):
        requests, prompt = int(rng.integers(1, 32)), int(rng.integers(0, 2) * rng.integers(1, 512))
        kv = int(rng.integers(100, 4000)) * requests
        size = StepSize(requests - 1 + max(1, prompt), requests, kv, kv + prompt * int(rng.integers(1, 4000)))
        steps.append(MeasuredStep(size, costs.seconds(size) * (1 + noise * float(rng.uniform(-1, 1)))))
    return steps


# Costs


@pytest.mark.parametrize("known", [KNOWN, StepCostModel(step=1e-3, token=1e-4)], ids=["all", "two"])
def test_a_fit_finds_the_coefficients_that_made_the_times(known):
    found, error = fit_and_check(random_steps(60, known))
    for name in ("step", "token", "request", "kv_token", "attended_token"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6, abs=1e-15)
    assert error.num_steps == 30
    assert max(error.p90, error.of_sum) < 1e-9


def test_the_error_is_that_of_steps_the_fit_has_not_seen():
    steps = random_steps(200, KNOWN, noise=0.2)
    _, error = fit_and_check(steps)
    assert 0.05 < error.median < 0.15  # uniform noise of up to 20 % is 10 % in the median
    assert error.p90 < 0.22
    every_other_twice_as_long = [replace(one, seconds=one.seconds * (1 + index % 2)) for index, one in enumerate(steps)]
    assert fit_and_check(every_other_twice_as_long)[1].of_sum == pytest.approx(0.5, abs=0.05)


def test_no_coefficient_is_negative():
    steps = [MeasuredStep(StepSize(n, 1, 10, 10), 1.0 - 0.001 * n) for n in range(1, 40)]
    found = StepCostModel.fit(steps)
    assert found.token == 0
    assert found.step + 10 * found.kv_token + 10 * found.attended_token + found.request == pytest.approx(0.98, abs=0.01)


def test_the_size_of_a_step_by_hand():
    """A prompt of 40 tokens in chunks of 32, then decode."""
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=32)
    scheduler = build_scheduler(
        System("lamella"), layer_specs("gemma-3-270m"), limits, budget_bytes=AMPLE_BYTES, max_model_len=64
    )
    scheduler.add(known_request("r", np.arange(40, dtype=np.int32), np.zeros(3, dtype=np.int32)))
    run = simulate(
        cluster(1, limits=limits, costs=StepCostModel(step=0, attended_token=1.0)),
        Traffic(requests=[turn("r", "s", 2, 2)], arrivals=QUEUED),
        ROUND_ROBIN,
    )
    assert StepSize.of(scheduler.schedule()) == StepSize(32, 1, 32, 32 * 33 // 2)
    assert run.seconds == 32 * 33 / 2 + 33


def test_a_file_of_steps(tmp_path):
    steps = random_steps(5, KNOWN)
    write_steps(steps, tmp_path / "steps.json")
    assert read_steps(tmp_path / "steps.json") == steps
    (tmp_path / "wrong.json").write_text('[{"num_tokens": 1}]')
    for name in ("wrong.json", "none.json"):
        with pytest.raises(ConfigError, match="num_tokens, num_requests, kv_tokens, attended_tokens and seconds"):
            read_steps(tmp_path / name)
    with pytest.raises(ConfigError, match=r"4 measured steps.*at least 5"):
        StepCostModel.fit(steps[:4])


# Times and hits


def test_virtual_time_by_hand():
    """Chunks of 32 tokens, a second a step. The first prompt takes two steps and its three outputs two more; the second
    arrives in the middle of the first step, shares the rest of the second and ends in the fourth."""
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=32)
    requests = [turn("a", "a", 3, 3), turn("b", "b", 1, 3, seconds=0.5)]
    result = simulate(
        cluster(1, limits=limits, costs=StepCostModel(step=1.0)), Traffic(requests=requests, arrivals=TIMED), PREFIX
    )
    assert result.num_steps == 4
    assert result.seconds == 4.0
    assert result.first_token == Percentiles.of([2.0, 1.5])
    assert result.answer == Percentiles.of([4.0, 3.5])
    assert result.busy_share == 1.0
    assert result.tokens_per_second == (48 + 3 + 16 + 3) / 4
    twice_as_fast = Traffic(requests=requests, arrivals=TIMED, speed=2.0)
    again = simulate(cluster(1, limits=limits, costs=StepCostModel(step=1.0)), twice_as_fast, PREFIX)
    assert again.answer == Percentiles.of([4.0, 3.75])


def pairs():
    """A, A, B, B, ..., far apart: a router that takes turns sends no prompt where it was."""
    return [
        turn(f"{scope}{index}", scope, 4, 2, seconds=100.0 * (2 * place + index))
        for place, scope in enumerate("ABCDEFGH")
        for index in range(2)
    ]


def test_hits_by_hand():
    """All but the last token of a prompt's second time is found where it was the first time, and nothing elsewhere."""
    found = {
        policy: simulate(cluster(2), Traffic(requests=pairs(), arrivals=TIMED), policy).hit_share
        for policy in (PREFIX, ROUND_ROBIN, LEAST_LOADED)
    }
    assert found[PREFIX] == found[LEAST_LOADED] == 63 / 128  # with no load, the first replica has the least
    assert found[ROUND_ROBIN] == 0


def test_a_known_queue_is_dealt_by_subtrees():
    traffic = Traffic(requests=pairs(), arrivals=QUEUED)
    one_at_a_time = replace(LIMITS, max_num_seqs=1)
    result = simulate(cluster(2, limits=one_at_a_time), traffic, SUBTREES)
    assert result.hit_share == 63 / 128
    assert result.most_over_mean_work == 1.0
    with pytest.raises(ConfigError, match="use arrivals='queued'"):
        simulate(cluster(2), Traffic(requests=pairs()), SUBTREES)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_is_answered_once_and_runs_are_the_same(policy):
    rng = np.random.default_rng(1)
    requests = [
        turn(f"{index}", f"s{index % 7}", int(rng.integers(1, 12)), int(rng.integers(1, 9))) for index in range(30)
    ]
    traffic = Traffic(requests=requests, arrivals=QUEUED if policy == SUBTREES else CLOSED, num_sessions=5)
    first, second = (simulate(cluster(3, budget_bytes=8 << 20), traffic, policy) for _ in range(2))
    assert first.num_requests == 30
    assert replace(first, wall_seconds=0) == replace(second, wall_seconds=0)
    assert 1 <= first.most_over_mean_work <= 3
    assert 0 < first.busy_share <= 1
    computed = sum(request.num_tokens - 1 for request in requests)
    assert first.num_steps <= computed
    assert 0 < first.hit_share < 1


def test_one_replica_of_all_memory():
    one = cluster(4).as_one()
    assert (one.num_replicas, one.budget_bytes) == (1, 4 * AMPLE_BYTES)
    assert one.limits == replace(LIMITS, max_num_seqs=32)


def test_a_trace_without_times_is_refused():
    with pytest.raises(ConfigError, match="does not say when its requests arrive"):
        Traffic(requests=[replace(turn("a", "a", 1, 1), arrival_seconds=None)], arrivals=TIMED)


# How many


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 20])
def test_the_fewest_replicas_are_found(needed):
    result = simulate(cluster(1), Traffic(requests=[turn("a", "a", 1, 1)]), PREFIX)

    def run(count):
        return replace(result, num_replicas=count, answer=Percentiles(0.0, needed / count, 9.0))

    choice = fewest_replicas(run, Target("p90", answer_seconds=1.0), budget_bytes=1, most_replicas=20)
    assert choice.result.num_replicas == needed
    assert choice.num_tried <= 9
    refused = fewest_replicas(run, Target("p99", answer_seconds=1.0), budget_bytes=1, most_replicas=20)
    assert (refused.result, refused.reason) == (None, "not met by 20 replicas")
    choices = [replace(choice, budget_bytes=4), replace(choice, budget_bytes=2), Choice(1, None, "no", 1)]
    assert cheapest(choices) == choices[1]
    assert cheapest(choices[2:]) is None


def test_a_replica_that_is_too_small_is_no_choice():
    def run(count):
        raise CapacityError("too small")

    assert fewest_replicas(run, Target(answer_seconds=1.0), budget_bytes=1, most_replicas=4).reason == "too small"


def test_the_command(tmp_path):
    write_two_sessions(tmp_path)
    write_steps(random_steps(20, KNOWN), tmp_path / "steps.json")
    common = ["--costs", str(tmp_path / "steps.json"), "--trace-dir", str(tmp_path), "--layout", "gemma-3-270m"]
    figures = tmp_path / "figures.json"
    arguments = ["compare", *common, "--replicas", "2", "--budget-requests", "50", "--sessions", "2"]
    outcome = CliRunner().invoke(benchmark_replicas.main, [*arguments, "--output-json", str(figures)])
    assert outcome.exit_code == 0, outcome.output
    results = json.loads(figures.read_text())
    assert [one["policy"] for one in results] == ["one replica", PREFIX, ROUND_ROBIN]
    # Each second turn finds the 351 tokens of the first that were computed.
    assert results[0]["hit_share"] == results[1]["hit_share"] == 2 * 351 / (2 * (320 + 384))
    assert results[0]["budget_bytes"] == 2 * results[1]["budget_bytes"]

    arguments = ["plan", *common, "--answer", "1", "--budget-requests", "50", "--most-replicas", "4"]
    outcome = CliRunner().invoke(benchmark_replicas.main, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "p90 of answer within 1 s: 1 replicas of" in outcome.output
    refused = CliRunner().invoke(benchmark_replicas.main, [*arguments, "--arrivals", "timed"])
    assert refused.exit_code == 1
    assert "Error: arrivals='timed'" in refused.output
