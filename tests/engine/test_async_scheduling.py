"""A step in flight while the next is planned: the engine's outputs are those without, and what waits is what must."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella import LLM, ConfigError, Engine, SamplingParams
from lamella.kv_cache.capacity import num_requests_that_fit
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import request_slabs
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.runner import LaunchedStep
from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.simulation import Simulation, full, sliding
from tests.helpers.tiny_gemma import save_tiny_gemma

MAX_MODEL_LEN = 96
ROOMY = {"kv_cache_memory_bytes": 2**22}
TIGHT = {"kv_cache_memory_bytes": 170 * 2**10}  # little more than one request of max_model_len
ARGUMENTS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 4,
    "check_invariants": True,
}
BASE = [(37 * position + 11) % 300 + 6 for position in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module", params=[ROOMY, TIGHT], ids=["roomy", "tight"])
def engines(folder, request):
    """(without, with) async scheduling."""
    arguments = {**ARGUMENTS, **request.param}
    with (
        Engine(model=folder, async_scheduling=False, **arguments) as plain,
        Engine(model=folder, async_scheduling=True, **arguments) as ahead,
    ):
        yield plain, ahead


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    abort_step: int | None


@st.composite
def arrivals(draw) -> Arrival:
    shared = draw(st.integers(0, 60))
    prompt = [*BASE[:shared], *draw(st.lists(st.integers(6, 319), min_size=1, max_size=4))]
    max_tokens = draw(st.sampled_from([1, 2, 5, 20, 30]))
    options = {"max_tokens": max_tokens, "ignore_eos": draw(st.booleans()), "seed": draw(st.integers(0, 99))}
    options["temperature"] = draw(st.sampled_from([0, 0, 1.0]))
    if options["temperature"]:
        options["n"] = draw(st.sampled_from([1, 1, 3]))
        options["top_k"] = draw(st.sampled_from([0, 5]))
    if draw(st.booleans()):  # about one token in eight ends the request
        options["stop_token_ids"] = [(start * 8 + draw(st.integers(0, 7))) % 320 for start in range(40)]
        options["min_tokens"] = min(draw(st.sampled_from([0, 0, 3])), max_tokens)
    elif draw(st.booleans()):
        options["stop"] = draw(st.sampled_from([["e"], ["th", " a"], ["zz"]]))
    options["logprobs"] = draw(st.sampled_from([None, None, 2]))
    abort_step = draw(st.none() | st.none() | st.integers(0, 30))
    return Arrival(draw(st.integers(0, 25)), prompt, SamplingParams(**options), abort_step)


def serve(engine: Engine, workload: list[Arrival]) -> tuple[dict, int]:
    """The last output of each request, and in how many steps another was in flight."""
    finished, step, num_ahead = {}, 0, 0
    while step <= max(one.step for one in workload) or engine.has_unfinished_requests():
        for index, one in enumerate(workload):
            if one.step == step:
                engine.add_request(str(index), one.prompt, one.params)
            if one.abort_step is not None and one.step + one.abort_step == step:
                finished.update({output.request_id: output for output in engine.abort(str(index))})
        finished.update({output.request_id: output for output in engine.step() if output.finished})
        num_ahead += len(engine.inspect().launched)
        step += 1
        assert step < 3000
    assert all(usage.owned == 0 for usage in engine.stats().pages.values())
    assert not engine.inspect().launched
    return finished, num_ahead


def assert_same(plain, ahead) -> None:
    assert plain.keys() == ahead.keys()
    for name, expected in plain.items():
        for sample, other in zip(expected.outputs, ahead[name].outputs, strict=True):
            if "abort" in (sample.finish_reason, other.finish_reason):
                length = min(len(sample.token_ids), len(other.token_ids))
                assert list(sample.token_ids[:length]) == list(other.token_ids[:length])
                continue
            assert list(sample.token_ids) == list(other.token_ids)
            assert (sample.text, sample.finish_reason, sample.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert (sample.logprobs is None) == (other.logprobs is None)
            for entry, same in zip(sample.logprobs or (), other.logprobs or (), strict=True):
                assert entry.keys() == same.keys()
                assert all(entry[one].logprob == pytest.approx(same[one].logprob, abs=1e-4) for one in entry)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(workload=st.lists(arrivals(), min_size=1, max_size=7))
def test_outputs_are_those_of_one_step_after_the_other(engines, workload):
    plain, ahead = engines
    for engine in engines:
        assert engine.reset_prefix_cache()
    assert_same(serve(plain, workload)[0], serve(ahead, workload)[0])


def test_the_engine_plans_ahead_even_where_requests_are_preempted(folder):
    workload = [
        Arrival(index, [50 + index, *BASE[:20]], dataclasses.replace(GREEDY, max_tokens=40), None) for index in range(6)
    ]
    results = []
    for is_async in (False, True):
        with Engine(model=folder, async_scheduling=is_async, **ARGUMENTS, **TIGHT) as engine:
            finished, num_ahead = serve(engine, workload)
            results.append(finished)
            stats = engine.stats()
            assert stats.num_preemptions > 0
            assert stats.num_generated_tokens == sum(len(one.outputs[0].token_ids) for one in finished.values()) == 240
            assert num_ahead > stats.num_steps / 2 if is_async else num_ahead == 0
    assert_same(*results)


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("call", [0, 1, 2, 5])
def test_a_failing_step_harms_nothing(folder, monkeypatch, where, call):
    prompts = [[*BASE[:30], 9], [*BASE[:18], 7, 8]]
    with Engine(model=folder, async_scheduling=False, **ARGUMENTS, **ROOMY) as engine:
        expected, _ = serve(engine, [Arrival(0, prompt, GREEDY, None) for prompt in prompts])
    with Engine(model=folder, async_scheduling=True, **ARGUMENTS, **ROOMY) as engine:
        runner_type = type(engine.inspect().runner)
        launch, calls = runner_type.launch, []

        def failing(*_):
            raise MemoryError("no memory")

        def launch_or_fail(runner, plan):
            calls.append(1)
            if len(calls) - 1 != call:
                return launch(runner, plan)
            if where == "launch":
                failing()
            return LaunchedStep(launch(runner, plan).token_ids, failing)

        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, GREEDY)
        finished, num_failed = {}, 0
        with monkeypatch.context() as patch:
            patch.setattr(runner_type, "launch", launch_or_fail)
            while engine.has_unfinished_requests():
                finished.update({output.request_id: output for output in engine.step() if output.finished})
                if engine.stats().num_failed_steps > num_failed:
                    num_failed += 1
                    assert not engine.inspect().launched
                    engine.check_invariants()
        assert num_failed == 1
        assert_same(expected, finished)
        assert all(usage.owned == 0 for usage in engine.stats().pages.values())


def test_aborting_all_leaves_nothing_in_flight(folder):
    with Engine(model=folder, async_scheduling=True, **ARGUMENTS, **ROOMY) as engine:
        for name in ("a", "b"):
            engine.add_request(name, BASE[:9], GREEDY)
        for _ in range(3):
            engine.step()
        assert len(engine.inspect().launched) == 1
        first = engine.abort("a")
        assert len(engine.inspect().launched) == 1
        assert any(usage.owned for usage in engine.stats().pages.values())
        engine.abort("b")
        assert not engine.inspect().launched
        assert all(usage.owned == 0 for usage in engine.stats().pages.values())
        assert engine.stats().num_generated_tokens == 6
        engine.add_request("a", BASE[:9], GREEDY)  # the id is free at once, and gets nothing of the first
        finished, _ = serve(engine, [Arrival(1, BASE[:5], GREEDY, None)])
        assert list(finished["a"].outputs[0].token_ids)[:3] == list(first[0].outputs[0].token_ids)


def test_an_engine_can_be_closed_with_a_step_in_flight(folder):
    engine = Engine(model=folder, async_scheduling=True, **ARGUMENTS, **ROOMY)
    engine.add_request("a", BASE[:9], GREEDY)
    engine.step()
    (token_ids,) = (weakref.ref(step.token_ids) for step in engine.inspect().launched)
    engine.close()
    gc.collect()
    assert token_ids() is None, "the step that was in flight is kept"


def test_it_is_off_on_a_cpu_unless_asked_for(folder):
    for given_value, expected in ((None, False), (True, True), (False, False)):
        with LLM(folder, async_scheduling=given_value, **ARGUMENTS, **ROOMY) as llm:
            assert llm.engine.is_async is expected
    with pytest.raises(ConfigError, match="async_scheduling='yes'"):
        LLM(folder, async_scheduling="yes")


# The scheduler alone, on a device that computes late


def test_a_decode_takes_its_token_from_the_step_in_flight():
    simulation = Simulation([full()])
    simulation.add("a", [1, 2, 3], 5)
    simulation.add("b", [4, 5, 6, 7], 1)
    simulation.add("c", [8, 9], 5)
    scheduler = simulation.scheduler
    first = scheduler.schedule()
    assert first.token_sources is None
    second = scheduler.schedule()
    assert scheduler.scheduled_rows.tolist() == [0, 2], "b gets its only token from the first"
    assert second.positions.tolist() == [3, 2]
    assert second.token_sources.tolist() == [0, 2]
    assert second.sampling.draw_index.tolist() == [1, 1]


def test_a_window_holds_room_for_a_token_more():
    """It slides by what is processed, one token later: W - 1 + max(interval, page) + 1 tokens."""
    for interval in (4, 12):
        held = []
        for kind in (Simulation, LateSimulation):
            simulation = kind([full(), sliding(9)], page_tokens=4, interval_tokens=interval)
            simulation.add("r", range(12), 45)
            held.append(0)
            while simulation.step():
                held[-1] = max(held[-1], simulation.manager.usage()["sliding_9"].owned)
            assert simulation.outputs["r"] == foretell(None, range(12), 45)
        assert held == [ceil_div(8 + interval, 4), ceil_div(9 + interval, 4)]


def test_as_many_requests_fit_as_without():
    """Exactly as many slabs as three requests of 44 tokens need: none is preempted, though windows lag by a token."""
    specs, length = [full(), sliding(9), sliding(5)], 44
    layout = build_layout(specs, page_tokens=4)
    sizes = {"context_tokens": length, "chunk_tokens": 4, "interval_tokens": 4}
    num_slabs = next(count for count in range(1, 500) if num_requests_that_fit(layout, count, **sizes) == 3)
    smallest = 1 + request_slabs(layout, max_model_len=length, chunk_tokens=4, interval_tokens=4)
    for kind in (Simulation, LateSimulation):
        simulation = kind(
            specs, page_tokens=4, max_model_len=length, chunk_tokens=4, extra_slabs=num_slabs - smallest, max_num_seqs=3
        )
        assert simulation.manager.inspect().arena.num_slabs == num_slabs
        for index in range(3):
            simulation.add(f"r{index}", [index, 1, 2], length)
        simulation.run()
        assert simulation.scheduler.counters().num_preemptions == 0
        for index in range(3):
            assert simulation.outputs[f"r{index}"] == foretell(None, [index, 1, 2], length - 3)


def test_equal_blocks_are_kept_once_and_none_is_taken_from_a_step_in_flight():
    simulation = LateSimulation([full(), sliding(5)], page_tokens=4, max_num_seqs=2, extra_slabs=400)
    for name in ("a", "b"):
        simulation.add(name, range(6), 20)
    num_given_up = 0
    while simulation.step():
        num_given_up += bool(simulation.manager.inspect().supply.given_up)
    assert num_given_up > 2
    assert not simulation.manager.inspect().supply.given_up
    assert simulation.outputs["a"] == simulation.outputs["b"] == foretell(None, range(6), 20)


def test_a_prefix_in_the_making_is_waited_for():
    """The second request comes while the first one's prompt is computed, in four chunks: it finds all of it."""
    found = []
    for kind in (Simulation, LateSimulation):
        simulation = kind([full(), sliding(5)], chunk_tokens=8, page_tokens=4, extra_slabs=400)
        simulation.add("a", range(30), 8)
        simulation.step()
        second = simulation.add("b", [*range(30), 40], 8)
        simulation.run()
        found.append((second.num_cached_tokens, simulation.outputs))
    assert found[0][1] == found[1][1]
    assert found[1][0] >= found[0][0] > 0


def test_requests_are_admitted_ahead_unless_they_share_a_prefix():
    for prompts, cached in (([range(20, 30), range(30, 40)], 0), ([range(20, 30), range(20, 30)], 8)):
        simulation = LateSimulation([full()], page_tokens=4, max_num_seqs=3, extra_slabs=400)
        simulation.add("a", range(6), 20)
        for _ in range(3):
            simulation.step()
        for name, prompt in zip("bc", prompts, strict=True):
            simulation.add(name, prompt, 5)
        simulation.step()
        assert len(simulation.launched) == 1
        assert [simulation.requests[name].row >= 0 for name in "bc"] == [True, cached == 0]
        simulation.run()
        assert simulation.requests["c"].num_cached_tokens == cached


def test_the_next_turn_finds_the_answer_before_it_while_that_leaves():
    answer = foretell(None, range(9), 20)
    stop = next(token for index, token in enumerate(answer) if index > 8 and token not in answer[:index])
    answer = answer[: answer.index(stop) + 1]
    found = []
    for kind in (Simulation, LateSimulation):
        simulation = kind([full(), sliding(5)], page_tokens=4, extra_slabs=400)
        first = simulation.add("a", range(9), 20, stop_token_ids=[stop])
        simulation.add("b", range(30, 40), 40)
        while not first.is_finished:
            simulation.step()
        second = simulation.add("c", [*range(9), *answer, 49, 48, 47, 46], 5)
        simulation.run()
        found.append(second.num_cached_tokens)
    assert found == [9 + len(answer) - 1, 16], "all, or whole blocks: the last one is still the first request's"


def test_penalties_are_planned_with_all_tokens_known():
    simulation = LateSimulation([full()], page_tokens=4, extra_slabs=400)
    simulation.add("free", range(6), 30)
    simulation.add("penalised", range(7), 10).params = SamplingParams(temperature=0, repetition_penalty=1.2)
    while not simulation.requests["penalised"].is_finished:
        simulation.step()
        assert not simulation.launched
    assert simulation.num_ahead == 0
    simulation.run()
    assert simulation.num_ahead > 10


def test_a_stop_token_ends_a_request_that_is_computed_already():
    answer = foretell(None, range(9), 20)
    stop = next(token for index, token in enumerate(answer) if index > 3 and token not in answer[:index])
    simulation = LateSimulation([full(), sliding(5)], page_tokens=4, extra_slabs=400)
    request = simulation.add("a", range(9), 20, stop_token_ids=[stop])
    other = simulation.add("b", range(30, 40), 20)
    while not request.is_finished:
        simulation.step()
    assert simulation.outputs["a"] == answer[: answer.index(stop) + 1]
    assert request.row >= 0, "its pages are held while the step in flight writes to them"
    assert simulation.num_discarded == 0
    simulation.step()
    assert request.row < 0
    assert simulation.num_discarded == 1
    assert simulation.scheduler.counters().num_generated_tokens == sum(map(len, simulation.outputs.values()))
    simulation.run()
    assert simulation.outputs["b"] == foretell(None, range(30, 40), 20)
    assert other.finish_reason == "length"
