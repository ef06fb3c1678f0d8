"""AsyncEngine: many callers, leaving, back-pressure, the end. Answers are compared with what prompts foretell."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import lamella
from lamella import (
    LLM,
    AsyncEngine,
    AsyncLLMEngine,
    CompletionOutput,
    ConfigError,
    Engine,
    EngineArgs,
    EngineClosedError,
    EngineCrashedError,
    LamellaError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    UnsupportedArgumentError,
)
from lamella.engine.streaming.engine_thread import MOST_FAILURES_IN_A_ROW
from lamella.engine.streaming.merged_outputs import merge_outputs
from tests.helpers.fake_engine import fake_models, foretell_answer
from tests.helpers.simulation import full, sliding
from tests.helpers.tiny_gemma import save_tiny_gemma

MAX_MODEL_LEN = 48
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, output_kind=DELTA)


def prompt_of(index: int) -> list[int]:
    return [(7 * position + index * 3 + index // 9) % 49 + 1 for position in range(6 + index % 11)]


def params_of(index: int) -> SamplingParams:
    kind = (DELTA, CUMULATIVE, FINAL_ONLY)[index % 3]
    return SamplingParams(
        n=1 + (index % 5 == 4), seed=index, max_tokens=4 + index % 9, stop=["c"] if index % 4 == 3 else [],
        output_kind=kind, logprobs=0,
    )  # fmt: skip


@contextmanager
def fake_engine(*, max_num_seqs: int = 4, **arguments):
    """Closed behind it, after which no thread and no page may be left."""
    sizes = {"max_num_seqs": max_num_seqs, "extra_slabs": 16 * max_num_seqs, "chunk_tokens": 8 * max_num_seqs}
    with fake_models([full(), sliding(5)], max_model_len=MAX_MODEL_LEN, **sizes):
        engine = AsyncEngine(model="fake", max_num_seqs=max_num_seqs, **arguments)
    try:
        yield engine
    finally:
        engine.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("lamella-")])


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.001)


async def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.001)


def run(coroutine):
    async def guarded():
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(guarded())


def assert_empty(engine: Engine) -> None:
    engine.check_invariants()
    assert all(usage.owned == 0 for usage in engine.stats().kv_cache.pages.values())
    assert engine.reset_prefix_cache()
    assert not engine.has_unfinished_requests()


async def collect(stream, kind):
    """(tokens, text, finish reason, stop reason) of each sample, and the log-probabilities, of all outputs."""
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    taken = outputs if kind is DELTA else outputs[-1:]
    found = []
    for index, last in enumerate(outputs[-1].outputs):
        parts = [output.outputs[index] for output in taken]
        tokens = [token for part in parts for token in part.token_ids]
        scored = [next(iter(entry)) for part in parts for entry in part.logprobs or ()]
        assert scored == (tokens if last.logprobs is not None else [])
        found.append((tokens, "".join(part.text for part in parts), last.finish_reason, last.stop_reason))
    return found


async def check_answer(engine, index, params=None):
    params = params or params_of(index)
    found = await collect(engine.generate(prompt_of(index), params), params.output_kind)
    assert found == [tuple(foretell_answer(prompt_of(index), params, one, MAX_MODEL_LEN)) for one in range(params.n)]


class Steps:
    """Within it, each step waits until it is allowed. At its beginning, who is in the engine is noted."""

    def __init__(self, monkeypatch, *, is_open=False):
        self.permits = threading.Semaphore(0)
        self.is_open = is_open
        self.seen = []
        self.num_ended = 0
        real = Engine.step

        def step(engine):
            requests = engine.inspect().scheduler.rows.requests
            self.seen.append((engine.num_unfinished_requests, {one.request_id for one in requests if one is not None}))
            # The time is there lest a test that fails never ends.
            assert self.is_open or self.permits.acquire(timeout=5)
            try:
                return real(engine)
            finally:
                self.num_ended += 1

        monkeypatch.setattr(Engine, "step", step)

    @property
    def is_held(self):
        """Whether a step has begun and not gone on."""
        return len(self.seen) == self.num_ended + 1

    def allow_one(self):
        self.permits.release()

    def open(self):
        self.is_open = True
        self.permits.release()


class TestAnswers:
    def test_of_many_at_once_are_those_that_the_prompts_foretell(self):
        async def main(engine):
            await asyncio.gather(*(check_answer(engine, index) for index in range(40)))
            assert_empty(engine.engine)

        for is_async in (False, True):
            with fake_engine(async_scheduling=is_async) as engine:
                run(main(engine))

    def test_from_several_loops_in_several_threads(self):
        async def main(engine, first):
            await asyncio.gather(*(check_answer(engine, first + index) for index in range(12)))

        with fake_engine(max_queued_requests=3) as engine, ThreadPoolExecutor(4) as pool:
            for call in [pool.submit(run, main(engine, 12 * one)) for one in range(4)]:
                call.result()
            assert_empty(engine.engine)

    def test_a_request_without_parameters_gets_the_models(self):
        async def main(engine):
            outputs = [output async for output in engine.generate(prompt_of(1))]
            assert 1 <= len(outputs[-1].outputs[0].token_ids) <= SamplingParams().max_tokens
            assert outputs[-1].request_id == "async-0"

        with fake_engine() as engine:
            run(main(engine))

    def test_what_cannot_be_run_is_an_error_of_its_caller_alone(self):
        async def main(engine):
            good = asyncio.create_task(check_answer(engine, 5))
            for prompt, params, message in (
                ([], LONG, "prompt is empty"),
                ([1] * 100, LONG, "shorten it to at most 47"),
                ([1], {"max_tokens": 3}, "must be a SamplingParams"),
                (prompt_of(1), SamplingParams(min_tokens=47, max_tokens=60), "leaves room for 41"),
            ):
                stream = engine.generate(prompt, params)
                with pytest.raises(RequestError, match=message):
                    await anext(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            with pytest.raises(RequestError, match="request_id=5: must be a string"):
                engine.generate([1], LONG, 5)
            with pytest.raises(UnsupportedArgumentError, match=r"^priority=1"):
                engine.generate([1], LONG, priority=1)
            with pytest.raises(TypeError, match="did you mean 'priority'"):
                engine.generate([1], LONG, priorty=1)
            await good
            await until(lambda: engine.num_unfinished_requests == 0)
            assert_empty(engine.engine)

        with fake_engine() as engine:
            run(main(engine))

    def test_an_id_in_use_is_refused_and_the_first_goes_on(self, monkeypatch):
        async def main(engine, steps):
            first = engine.generate(prompt_of(1), LONG, "same", priority=0, trace_headers=None)
            steps.allow_one()
            tokens = (await anext(first)).outputs[0].token_ids
            second = asyncio.create_task(anext(engine.generate(prompt_of(2), LONG, "same")))
            await until(lambda: engine._thread._calls.qsize() == 1)
            steps.open()
            with pytest.raises(RequestError, match="'same' is in use"):
                await second
            async for output in first:
                tokens = tokens + output.outputs[0].token_ids
            assert tokens == foretell_answer(prompt_of(1), LONG, 0, MAX_MODEL_LEN).token_ids
            await check_answer(engine, 3)

        with fake_engine() as engine:
            run(main(engine, Steps(monkeypatch)))


class TestLeaving:
    def test_half_of_200_streams_and_their_pages_are_free_within_a_step(self, monkeypatch):
        """Left in four ways while no step can end: the step after the one that runs begins without them."""

        async def read(engine, index, holder):
            stream = holder[index] = engine.generate(prompt_of(index), LONG, str(index))
            return [output async for output in stream]

        async def leave_by_break(engine, index, event):
            async for _ in engine.generate(prompt_of(index), LONG, str(index)):
                await event.wait()
                break
            await asyncio.sleep(3600)

        async def main(engine, steps):
            streams = {}
            event = asyncio.Event()
            kept = {index: asyncio.create_task(read(engine, index, streams)) for index in range(0, 200, 2)}
            breaking = [asyncio.create_task(leave_by_break(engine, index, event)) for index in range(1, 200, 8)]
            cancelled = [asyncio.create_task(read(engine, index, streams)) for index in range(3, 200, 8)]
            closed = [engine.generate(prompt_of(index), LONG, str(index)) for index in range(5, 200, 8)]
            dropped = [engine.generate(prompt_of(index), LONG, str(index)) for index in range(7, 200, 8)]
            firsts = [asyncio.create_task(anext(one)) for one in (*closed, *dropped)]
            await asyncio.sleep(0.1)
            while engine.engine.num_unfinished_requests < 200 or not all(first.done() for first in firsts):
                await until(lambda: steps.is_held)
                steps.allow_one()
                await asyncio.sleep(0.01)
            await until(lambda: steps.is_held)
            num_begun = len(steps.seen)
            event.set()
            for task in cancelled:
                task.cancel()
            for stream in closed:
                await stream.aclose()
            dropped.clear()
            firsts.clear()
            await asyncio.wait(cancelled)
            await asyncio.sleep(0.02)
            steps.allow_one()
            await until(lambda: len(steps.seen) > num_begun)
            unfinished, running = steps.seen[num_begun]
            assert unfinished == 100
            assert running <= {str(index) for index in kept}
            steps.open()
            for index, task in kept.items():
                tokens = [token for output in await task for token in output.outputs[0].token_ids]
                assert tokens == foretell_answer(prompt_of(index), LONG, 0, MAX_MODEL_LEN).token_ids
            for task in breaking:
                task.cancel()
            assert engine.num_unfinished_requests == 0
            assert_empty(engine.engine)

        with fake_engine(max_num_seqs=200) as engine:
            steps = Steps(monkeypatch)
            run(main(engine, steps))

    @pytest.mark.parametrize("num_seeds", [30, pytest.param(2000, marks=pytest.mark.slow)])
    def test_cancelled_at_any_await_point(self, num_seeds):
        """After so many turns of the loop, with others running and waiting; the others get their answers."""

        async def main(engine, seed):
            draw = random.Random(seed)
            others = [asyncio.create_task(check_answer(engine, draw.randrange(60))) for _ in range(2)]
            tasks = []
            for _ in range(6):
                index = draw.randrange(60)
                tasks.append(asyncio.create_task(check_answer(engine, index, None if draw.random() < 0.5 else LONG)))
                for _ in range(draw.randrange(12)):
                    await asyncio.sleep(draw.choice((0, 0, 0.0005)))
                draw.choice(tasks).cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            await asyncio.gather(*others)
            await until(lambda: engine.num_unfinished_requests == 0)
            assert_empty(engine.engine)
            return sum(isinstance(result, asyncio.CancelledError) for result in results)

        with fake_engine(max_num_seqs=2, max_queued_requests=1) as engine:
            assert sum(run(main(engine, seed)) for seed in range(num_seeds)) > num_seeds

    def test_a_closed_loop_harms_nobody(self):
        async def main(engine):
            await asyncio.gather(*(check_answer(engine, index) for index in range(8)))
            await until(lambda: engine.num_unfinished_requests == 0)
            assert_empty(engine.engine)

        with fake_engine(max_num_seqs=2, max_queued_requests=2) as engine:
            loop = asyncio.new_event_loop()
            # Two run, two are queued, two wait for admission when their loop ends; of some the prompt is being parsed.
            streams = [engine.generate(prompt_of(index), LONG) for index in range(6)]
            waits = [loop.create_task(anext(stream)) for stream in streams]
            loop.run_until_complete(waits[0])
            loop.close()
            run(main(engine))
            for wait in waits:
                wait._log_destroy_pending = False
            del streams, waits, wait
            gc.collect()

    def test_places_of_a_closed_loop_are_taken_back_though_its_streams_are_kept(self):
        """Their prompts are being parsed when the loop ends, so that nobody will ever add them."""

        async def main(engine):
            await asyncio.gather(*(check_answer(engine, index) for index in range(4)))

        with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
            loop = asyncio.new_event_loop()
            streams = [engine.generate(prompt_of(index), LONG) for index in range(2)]
            waits = [loop.create_task(anext(stream)) for stream in streams]
            loop.run_until_complete(asyncio.sleep(0))  # each has its place, none has its prompt
            loop.close()
            assert engine.num_unfinished_requests == 2
            run(main(engine))
            for wait in waits:
                wait._log_destroy_pending = False
            assert len(streams) == 2

    def test_one_task_at_a_time_waits_and_in_the_loop_in_which_it_began(self, monkeypatch):
        async def main(engine, steps):
            stream = engine.generate(prompt_of(1), LONG)
            waiting = asyncio.create_task(anext(stream))
            await until(lambda: steps.seen)
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="cancel that task"):
                await stream.aclose()
            steps.allow_one()
            await waiting
            return stream

        with fake_engine() as engine:
            steps = Steps(monkeypatch)
            stream = run(main(engine, steps))
            with pytest.raises(RuntimeError, match="another event loop"):
                run(anext(stream))
            del stream
            steps.open()
            wait_until(lambda: engine.num_unfinished_requests == 0)

    def test_abort_gives_a_last_output_wherever_the_request_is(self):
        async def main(engine):
            streams = [engine.generate(prompt_of(index), LONG, str(index)) for index in range(4)]
            tasks = [asyncio.create_task(collect(stream, DELTA)) for stream in streams]
            await until(lambda: engine.num_waiting_requests == 2)
            await engine.abort([str(index) for index in range(4)] + ["unknown"])
            results = await asyncio.gather(*tasks)
            for index, [(tokens, _, finish_reason, _)] in enumerate(results):
                assert finish_reason == "abort"
                assert tokens == foretell_answer(prompt_of(index), LONG, 0, MAX_MODEL_LEN).token_ids[: len(tokens)]
            assert results[3] == [([], "", "abort", None)]
            await check_answer(engine, 1)
            assert_empty(engine.engine)

        with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
            gate = engine._gate
            assert gate.most_inside == 2
            run(main(engine))


class TestBackPressure:
    def test_a_slow_callers_outputs_are_merged_and_others_do_not_wait(self):
        async def main(engine):
            slow = engine.generate(prompt_of(0), LONG)
            kinds = {
                kind: SamplingParams(seed=3, max_tokens=30, ignore_eos=True, output_kind=kind)
                for kind in (CUMULATIVE, FINAL_ONLY)
            }
            others = {kind: engine.generate(prompt_of(0), params) for kind, params in kinds.items()}
            first = await anext(slow)
            early = await anext(others[CUMULATIVE])
            final = asyncio.create_task(anext(others[FINAL_ONLY]))
            await asyncio.gather(*(check_answer(engine, index) for index in range(12)))
            await until(lambda: engine.num_unfinished_requests == 0)
            expected = foretell_answer(prompt_of(0), LONG, 0, MAX_MODEL_LEN)
            rest = [output async for output in slow]
            assert len(rest) <= 1  # none where all had come before this loop looked for the first time
            parts = [output.outputs[0] for output in (first, *rest)]
            assert [token_id for part in parts for token_id in part.token_ids] == expected.token_ids
            assert "".join(part.text for part in parts) == expected.text
            assert early.outputs[0].token_ids == expected.token_ids[: len(early.outputs[0].token_ids)]
            later = [one async for one in others[CUMULATIVE]]
            assert len(later) <= 1
            assert [early, *later][-1].outputs[0].token_ids == expected.token_ids
            assert (await final).outputs[0].token_ids == expected.token_ids

        with fake_engine() as engine:
            run(main(engine))

    def test_a_blocked_loop_is_told_once(self):
        """Its queue of calls does not grow with the steps that it misses."""

        async def main(engine):
            loop = asyncio.get_running_loop()
            stream = engine.generate(prompt_of(0), LONG)
            tokens = (await anext(stream)).outputs[0].token_ids
            calls = []
            real = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *call: (calls.append(call), real(*call))
            wait_until(lambda: engine.num_unfinished_requests == 0)
            loop.call_soon_threadsafe = real
            tokens += [token async for output in stream for token in output.outputs[0].token_ids]
            assert len(calls) <= 1
            assert tokens == foretell_answer(prompt_of(0), LONG, 0, MAX_MODEL_LEN).token_ids

        with fake_engine() as engine:
            run(main(engine))

    def test_no_more_than_may_be_queued_are_in_the_engine_and_the_first_come_first(self, monkeypatch):
        order = []

        async def one(engine, index):
            async for output in engine.generate(prompt_of(index), LONG):
                if output.finished:
                    order.append(index)

        async def main(engine):
            await asyncio.gather(*(one(engine, index) for index in range(9)))

        with fake_engine(max_num_seqs=1, max_queued_requests=2) as engine:
            steps = Steps(monkeypatch, is_open=True)
            run(main(engine))
            assert max(unfinished for unfinished, _ in steps.seen) == 3
            assert order[3:] == list(range(3, 9))  # the first three are tokenised at once
        for value in (-1, 1.5, True, "4"):
            with pytest.raises(ConfigError, match=r"^max_queued_requests="):
                AsyncEngine(model="fake", max_queued_requests=value)

    def test_steps_go_on_while_a_prompt_is_parsed(self, monkeypatch):
        is_allowed, threads = threading.Event(), []
        real = Engine.parse

        def parse(engine, prompt, *arguments):
            threads.append(threading.current_thread().name)
            if prompt == prompt_of(7):
                assert is_allowed.wait(30)
            return real(engine, prompt, *arguments)

        async def main(engine):
            held = asyncio.create_task(check_answer(engine, 7))
            await check_answer(engine, 1)
            assert not held.done()
            is_allowed.set()
            await held

        monkeypatch.setattr(Engine, "parse", parse)
        with fake_engine() as engine:
            run(main(engine))
        assert {name.split("_")[0] for name in threads} == {"lamella-helper"}

    def test_what_merging_keeps(self):
        def output(text, tokens, reason=None, finished=False, prompt_logprobs=None):
            samples = [
                CompletionOutput(1, text, tokens, finish_reason=reason, logprobs=[{one: None} for one in tokens])
            ]
            return RequestOutput(
                "a", None, [1], outputs=samples, finished=finished, prompt_logprobs=prompt_logprobs
            )  # fmt: skip

        early, late = output("ab", [1, 2], prompt_logprobs=[None]), output("c", [3], "stop", True)
        merged = merge_outputs(early, late, DELTA)
        assert merged == output("abc", [1, 2, 3], "stop", True, [None])
        assert merge_outputs(early, late, CUMULATIVE) is late
        assert (
            merge_outputs(early, RequestOutput("a", None, [1], outputs=[], finished=True), DELTA).outputs
            == early.outputs
        )


class TestFailures:
    def test_steps_that_fail_now_and_then_are_tried_again(self):
        fails_at = {3: "launch", 4: "result", 5: "update", 9: "result", 20: "update"}

        async def main(engine):
            await asyncio.gather(*(check_answer(engine, index) for index in range(12)))
            assert_empty(engine.engine)

        with fake_models([full(), sliding(5)], fails_at, max_model_len=MAX_MODEL_LEN, extra_slabs=60):
            engine = AsyncEngine(model="fake")
        run(main(engine))
        engine.close()

    def test_a_crash_reaches_all_and_who_comes_later(self, monkeypatch):
        number = iter(range(1000))
        real = Engine.step

        def step(engine):
            if next(number) >= 5:
                raise ZeroDivisionError("a fault")
            return real(engine)

        async def main(engine):
            streams = [engine.generate(prompt_of(index), LONG) for index in range(6)]
            read = await anext(streams[0])
            results = await asyncio.gather(*(collect(one, DELTA) for one in streams), return_exceptions=True)
            assert len(read.outputs[0].token_ids) > 0
            assert [type(result) for result in results] == [EngineCrashedError] * 6
            assert len(set(map(id, results))) == 6
            for call in (
                lambda: anext(engine.generate(prompt_of(1))),
                engine.stats,
                engine.drain,
                lambda: engine.abort("a"),
                lambda: engine.pin_prefix([1, 2]),
            ):
                with pytest.raises(EngineCrashedError, match=r"ZeroDivisionError: a fault; make a new") as raised:
                    await call()
                results.append(raised.value)
            assert {type(error.__cause__) for error in results} == {ZeroDivisionError}
            assert engine.is_closed

        monkeypatch.setattr(Engine, "step", step)
        with fake_engine(max_num_seqs=2, max_queued_requests=1) as engine:
            run(main(engine))
            wait_until(lambda: engine.engine.is_closed)
        assert next(number) == 5 + MOST_FAILURES_IN_A_ROW

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, EngineClosedError])
    def test_what_is_no_failure_of_a_step_ends_it_at_once(self, monkeypatch, error):
        def step(engine):
            raise error("over")

        async def main(engine):
            with pytest.raises(EngineCrashedError, match=f"{error.__name__}: over"):
                await anext(engine.generate(prompt_of(1)))

        monkeypatch.setattr(Engine, "step", step)
        with fake_engine() as engine:
            run(main(engine))

    def test_somebody_else_who_takes_the_outputs_is_named(self):
        async def main(engine):
            stream = engine.generate(prompt_of(1), LONG, "mine")
            await anext(stream)
            while not engine.engine.abort("mine"):
                pass
            with pytest.raises(EngineCrashedError, match="something else stepped the engine"):
                await collect(stream, DELTA)

        with fake_engine() as engine:
            run(main(engine))

    def test_a_request_that_failed_has_a_last_output_and_then_raises(self, monkeypatch):
        real = Engine.step

        def step(engine):
            outputs = real(engine)
            assert [output.request_id for output in outputs] == ["bad"]
            last = engine.abort("bad")[0]
            samples = [*outputs[0].outputs, *last.outputs][:1]
            error = LamellaError("it went wrong")
            return [RequestOutput("bad", None, [1], outputs=samples, finished=True, error=error)]

        async def main(engine):
            stream = engine.generate(prompt_of(1), LONG, "bad")
            output = await anext(stream)
            assert output.finished
            assert len(output.outputs[0].token_ids) == 1
            with pytest.raises(LamellaError, match="it went wrong"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert engine.num_unfinished_requests == 0

        monkeypatch.setattr(Engine, "step", step)
        with fake_engine() as engine:
            run(main(engine))


class TestTheEnd:
    def test_drain_refuses_new_ones_and_ends_with_the_last(self, monkeypatch):
        async def main(engine, steps):
            tasks = [asyncio.create_task(check_answer(engine, index, LONG)) for index in range(6)]
            await until(lambda: engine.num_unfinished_requests == 6 and steps.seen)
            assert not await engine.drain(0.01)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError, match="being drained"):
                await anext(engine.generate(prompt_of(1)))
            assert not draining.done()
            steps.open()
            assert await draining
            assert engine.num_unfinished_requests == 0
            await asyncio.gather(*tasks)
            assert await engine.drain(0)
            assert_empty(engine.engine)

        with fake_engine(max_num_seqs=2, max_queued_requests=1) as engine:
            run(main(engine, Steps(monkeypatch)))

    def test_outputs_that_are_ready_outlive_the_engine(self):
        async def main(engine):
            async with engine:
                stream = engine.generate(prompt_of(0), LONG)
                tokens = (await anext(stream)).outputs[0].token_ids
                assert await engine.drain(30)
            assert engine.is_closed
            tokens += [token async for output in stream for token in output.outputs[0].token_ids]
            assert tokens == foretell_answer(prompt_of(0), LONG, 0, MAX_MODEL_LEN).token_ids

        with fake_engine() as engine:
            run(main(engine))

    def test_close_ends_who_runs_who_is_queued_and_who_waits(self, monkeypatch):
        async def main(engine, steps):
            tasks = [asyncio.create_task(collect(engine.generate(prompt_of(index), LONG), DELTA)) for index in range(6)]
            await until(lambda: engine.num_unfinished_requests == 6 and steps.seen)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            await asyncio.sleep(0.01)
            steps.allow_one()
            await closing
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [EngineClosedError] * 6
            assert await draining
            for call in (lambda: anext(engine.generate(prompt_of(1))), engine.stats, engine.drain):
                with pytest.raises(EngineClosedError, match=r"is closed: make a new one"):
                    await call()
            engine.close()

        with fake_engine(max_num_seqs=2, max_queued_requests=1) as engine:
            run(main(engine, Steps(monkeypatch)))
            assert engine.engine.is_closed

    def test_one_that_is_forgotten_ends_its_thread(self):
        with fake_models([full()], max_model_len=MAX_MODEL_LEN):
            engine = AsyncEngine(model="fake")

        async def main(stream):
            return [output async for output in stream]

        stream = engine.generate(prompt_of(1), LONG)
        inner = engine.engine
        del engine
        gc.collect()
        assert run(main(stream))[-1].finished  # an iterator keeps its engine
        assert not inner.is_closed
        del stream
        gc.collect()
        wait_until(lambda: inner.is_closed)
        wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("lamella-")])


LIVES = """
import asyncio, os, sys
from lamella import AsyncEngine, ForkedProcessError, SamplingParams
engine = AsyncEngine(model=sys.argv[1], max_model_len=256, kv_cache_memory_bytes=2**22)
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
async def main():
    streams = [engine.generate([5, 6, index], params) for index in range(4)]
    for stream in streams:
        await anext(stream)
    return streams
streams = asyncio.run(main())
if (child := os.fork()) == 0:
    async def use():
        for call in (lambda: engine.generate("a"), lambda: streams[0], engine.stats, engine.drain):
            try:
                made = call()
                await (made if asyncio.iscoroutine(made) else anext(made))
            except (ForkedProcessError, RuntimeError) as error:
                print(type(error).__name__)
    asyncio.run(use())
    engine.close()
    print("closed", flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("end", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


def test_a_program_that_never_closes_it_ends_and_a_forked_child_is_told(folder):
    """With streams open."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LIVES, folder],
        capture_output=True, text=True, timeout=100, cwd=Path(lamella.__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.stderr == ""
    assert result.returncode == 0
    told = ["ForkedProcessError", "RuntimeError", "ForkedProcessError", "ForkedProcessError", "closed", "end"]
    assert result.stdout.split() == told


ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class TestARealModel:
    def test_it_answers_as_llm_does(self, folder):
        conversation = [{"role": "user", "content": "the cat"}]
        prompts = ["the quick", [9, 8], {"prompt": "a window"}]
        with LLM(folder, **ARGUMENTS) as llm:
            expected = llm.generate(prompts, GREEDY, use_tqdm=False)
            expected += llm.chat(conversation, GREEDY, use_tqdm=False)
            rendered = llm.chat_prompts(conversation)

        async def main():
            async with AsyncEngine(EngineArgs(folder, **ARGUMENTS)) as engine:
                streams = [engine.generate(prompt, GREEDY) for prompt in prompts]
                streams.append(engine.chat(conversation, GREEDY))
                results = await asyncio.gather(*(last_of(stream) for stream in streams))
                assert await engine.chat_prompts(conversation) == rendered
                with pytest.raises(RequestError, match="list of 2 conversations"):
                    await anext(engine.chat([conversation, conversation]))
                assert engine.get_tokenizer().encode("the cat")
                assert engine.max_model_len == 128
                assert "full" in await engine.kv_cache_report()
            return results

        async def last_of(stream):
            return [output async for output in stream][-1]

        for found, wanted in zip(run(main()), expected, strict=True):
            assert found.outputs == wanted.outputs
            assert (found.prompt, found.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)

    def test_prefixes_are_pinned_saved_and_loaded(self, folder, tmp_path):
        prefix = list(range(20, 60))

        async def main():
            async with AsyncLLMEngine.from_engine_args(
                EngineArgs(folder, **ARGUMENTS), start_engine_loop=True
            ) as engine:
                pinned = await engine.pin_prefix(prefix, name="system")
                assert pinned.is_cached
                outputs = [one async for one in engine.generate([*prefix, 7], GREEDY)]
                assert outputs[0].num_cached_tokens >= 32
                saved = await engine.save_prefix(tmp_path / "prefix", prefix)
                assert [one.name for one in await engine.pinned_prefixes()] == ["system"]
                await engine.unpin_prefix("system")
                assert await engine.pinned_prefixes() == []
                assert await engine.reset_prefix_cache(reset_running_requests=False)
                assert (await engine.load_prefix(tmp_path / "prefix")).token_ids == saved.token_ids
                with pytest.raises(RequestError, match="enable_lora=True"):
                    await engine.add_lora(lamella.LoRARequest("a", 1, "nowhere"))
                assert await engine.list_loras() == set()
                assert (await engine.stats()).num_generated_tokens == 10

        run(main())
        with pytest.raises(ConfigError, match=r"^start_engine_loop=False"):
            AsyncEngine.from_engine_args(EngineArgs(folder), start_engine_loop=False)
