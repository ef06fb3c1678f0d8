"""Several engines share an LLM's requests: each runs to its end once, whoever is lost."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella import LLM, SamplingParams
from lamella.distributed.ray_cluster import connect
from lamella.distributed.replica import QueuedRequest
from lamella.distributed.replica_set import Answer
from lamella.distributed.replicated_engine import ReplicatedEngine
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine
from lamella.engine.outputs import CompletionOutput, RequestOutput
from lamella.engine.sampling_params import RequestOutputKind
from lamella.errors import ConfigError, EngineClosedError, ReplicaLostError, RequestError
from tests.helpers.parallel_models import Prompts
from tests.helpers.processes import called, wait_until
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8}
ON_RAY: dict[str, Any] = {
    "data_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "ray_actor_options": {"num_cpus": 0},
}
FINAL = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(folder, num_hidden_layers=2, sliding_window_pattern=2)
    return folder


def foretold(request: QueuedRequest) -> list[int]:
    """What a request's output is, by its prompt and seed alone."""
    tokens = request.prompt["prompt_token_ids"]
    return [(int(tokens.sum()) + request.params.seed) % 997, len(tokens)]


class ForetoldReplicas:
    """Engines that answer what is foretold, some requests at a time, in any order, and that are lost at random."""

    def __init__(self, num_replicas: int, seed: int, loss_rate: float) -> None:
        self.max_model_len, self.num_restarts, self.is_closed = 256, 0, False
        self.given: list[dict[str, QueuedRequest]] = [{} for _ in range(num_replicas)]
        self.num_run: dict[str, int] = {}
        self._is_called = [False] * num_replicas
        self._turns_to_start = [0] * num_replicas
        self._random, self._loss_rate = random.Random(seed), loss_rate

    def is_ready(self, index: int) -> bool:
        return not self._is_called[index] and not self._turns_to_start[index]

    def is_lost(self, index: int) -> bool:
        return self._turns_to_start[index] > 0

    def run(self, index: int, added: list[QueuedRequest], aborted: list[str]) -> None:
        assert self.is_ready(index)
        for request_id in aborted:
            self.given[index].pop(request_id, None)  # it may just have finished
        for request in added:
            assert not any(request.request_id in given for given in self.given), "it runs already"
            self.given[index][request.request_id] = request
            self.num_run[request.request_id] = self.num_run.get(request.request_id, 0) + 1
        self._is_called[index] = True

    def wait(self, seconds: float) -> list[Answer]:
        answers = []
        for index, given in enumerate(self.given):
            self._turns_to_start[index] = max(0, self._turns_to_start[index] - 1)
            if not self._is_called[index] or self._random.random() < 0.3:
                continue
            self._is_called[index] = False
            if self._random.random() < self._loss_rate:
                given.clear()
                self.num_restarts += 1
                self._turns_to_start[index] = self._random.randrange(1, 5)
                answers.append(Answer(index, None))
                continue
            finished = self._random.sample(sorted(given), k=self._random.randint(0, min(len(given), 3)))
            answers.append(Answer(index, [self._output(given.pop(request_id)) for request_id in finished]))
        return answers

    def _output(self, request: QueuedRequest) -> RequestOutput:
        tokens = request.prompt["prompt_token_ids"].tolist()
        completion = CompletionOutput(index=0, text="", token_ids=foretold(request), finish_reason="length")
        return RequestOutput(request.request_id, None, tokens, outputs=[completion], finished=True)

    def each(self, ask: Callable[[Any], Any], seconds: float) -> Sequence[Any]:
        return [True] * len(self.given)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("seed", range(12))
def test_every_request_finishes_once_whoever_is_lost(tiny: Path, seed: int) -> None:
    """Requests that come at once, and later; some are aborted."""
    chance = random.Random(seed)
    replicas = ForetoldReplicas(chance.randint(2, 5), seed, loss_rate=0.0 if seed == 0 else 0.2)
    config = EngineConfig(
        model=str(tiny), **{**ARGUMENTS, "max_num_seqs": 2, "data_parallel_size": len(replicas.given)}
    )
    engine = ReplicatedEngine(config, lambda config: replicas)
    prompts = Prompts.drawn(seed, (3, 20, 50)).token_ids
    added: dict[str, list[int]] = {}
    aborted: set[str] = set()
    finished: dict[str, RequestOutput] = {}

    arrivals: list[str] = []

    def give(name: str) -> None:
        engine.add_request(name, added[name], FINAL)
        arrivals.append(name)

    def add(count: int) -> None:
        for _ in range(count):
            name = f"request {len(added)}"
            added[name] = [*chance.choice(prompts), 10 + len(added) % 200]
            give(name)

    add(60)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in finished, "it came twice"
            finished[output.request_id] = output
        if len(added) < 120 and chance.random() < 0.3:
            add(chance.randint(1, 9))
        if chance.random() < 0.1 and (left := sorted(added.keys() - finished.keys())):
            name = chance.choice(left)
            (output,) = engine.abort(name)
            assert output.outputs[0].finish_reason == "abort"
            if chance.random() < 0.5:  # under the same name it is another request
                give(name)
                continue
            aborted.add(name)
            finished[name] = output
    assert finished.keys() == added.keys()
    last_arrival = {name: index for index, name in enumerate(arrivals)}
    for name, tokens in added.items():
        output, index = finished[name], last_arrival[name]
        assert output.prompt_token_ids == tokens
        if name in aborted:
            assert output.outputs[0].finish_reason == "abort"
            continue
        seed_of_it = (index * 0xD1B54A32D192ED03 + 1) % 2**64  # by the order of arrival, as in one engine
        assert output.outputs[0].token_ids == [(sum(tokens) + seed_of_it) % 997, len(tokens)]
    assert (replicas.num_restarts > 0) == (seed != 0)
    if seed == 0:
        assert set(replicas.num_run.values()) == {1}
        assert len(arrivals) > len(added), "no name was used again"
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()


def test_what_several_engines_do_not_do_is_refused(tiny: Path) -> None:
    replicas = ForetoldReplicas(2, 0, 0.0)
    config = EngineConfig(model=str(tiny), data_parallel_size=2, **ARGUMENTS)
    engine = ReplicatedEngine(config, lambda config: replicas)
    with pytest.raises(RequestError, match="FINAL_ONLY"):
        engine.add_request("a", [5, 6], SamplingParams(max_tokens=3))
    engine.add_request("a", [5, 6], FINAL)
    for call, told in (
        (lambda: engine.add_request("a", [5, 6], FINAL), "in use"),
        (lambda: engine.add_request("b", [5, 10**6], FINAL), "must lie in"),
        (lambda: engine.pin_prefix([5, 6]), "a cache of its own"),
        (lambda: engine.save_prefix("file", [5, 6]), "a cache of its own"),
        (lambda: engine.reset_prefix_cache(), "while requests run"),
    ):
        with pytest.raises(RequestError, match=told):
            call()
    with pytest.raises(ConfigError, match="give it to LLM"):
        Engine(config)
    for arguments, told in (
        ({"distributed_executor_backend": "mp"}, "run on Ray"),
        ({"enable_lora": True}, "adapters are not loaded"),
    ):
        with pytest.raises(ConfigError, match=told):
            LLM(str(tiny), data_parallel_size=2, **arguments)


def kill_one(after_seconds: float, chosen: int) -> threading.Thread:
    def kill() -> None:
        time.sleep(after_seconds)
        processes = sorted(called("ray::Replica"))
        os.kill(processes[chosen % len(processes)], 9)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def sampled(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[int]]]:
    params = SamplingParams(temperature=0.9, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def many_prompts(count: int) -> list[list[int]]:
    beginnings = Prompts.drawn(1, (40, 60)).token_ids
    generator = np.random.default_rng(2)
    return [[*beginnings[index % 3], *generator.integers(6, 300, size=3).tolist()] for index in range(count)]


def test_two_engines_give_what_one_gives_though_one_is_killed(tiny: Path) -> None:
    """Sampled tokens, too: seeds follow from the order of arrival."""
    prompts = many_prompts(80)
    with LLM(str(tiny), **ARGUMENTS) as llm:
        expected = [sampled(llm, prompts, 40) for _ in range(2)]
    connect()
    with LLM(str(tiny), **ON_RAY, **ARGUMENTS) as llm:
        assert sampled(llm, prompts, 40) == expected[0]
        counters = llm.engine.counters()
        assert all(each["num_generated_tokens"] > 0 for each in counters)
        assert sum(each["num_generated_tokens"] for each in counters) == 80 * 40
        thread = kill_one(0.1, 0)
        assert sampled(llm, prompts, 40) == expected[1]
        thread.join()
    assert wait_until(lambda: not called("ray::Replica"), 10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_two_killed_at_any_moment(tiny: Path) -> None:
    """Ten seeds; `pytest -s` prints what the loss took."""
    prompts = many_prompts(160)
    connect()
    with LLM(str(tiny), **ARGUMENTS) as llm, LLM(str(tiny), **ON_RAY, **ARGUMENTS) as several:
        assert sampled(several, prompts, 100) == sampled(llm, prompts, 100)
        expected = sampled(llm, prompts, 100)
        started = time.monotonic()
        assert sampled(several, prompts, 100) == expected
        undisturbed = time.monotonic() - started
        for seed in range(10):
            expected = sampled(llm, prompts, 100)
            assert wait_until(lambda: len(called("ray::Replica")) == 2, 60)
            num_restarts = several.engine.num_restarts
            started = time.monotonic()
            thread = kill_one(random.Random(seed).uniform(0, undisturbed), seed)
            assert sampled(several, prompts, 100) == expected
            took = time.monotonic() - started
            thread.join()
            print(f"seed {seed}: {took:.2f} s, undisturbed {undisturbed:.2f} s")
            # A loss after the last answer is noticed by the next batch, of which both engines get some.
            assert sampled(several, prompts[:40], 2) == sampled(llm, prompts[:40], 2)
            assert several.engine.num_restarts == num_restarts + 1


@pytest.mark.slow
def test_an_engine_that_keeps_dying_stops_the_job(tiny: Path) -> None:
    connect()
    deadly = SamplingParams(max_tokens=5, logits_processors=[_end_the_process])
    with LLM(str(tiny), **ON_RAY, **ARGUMENTS) as llm:
        with pytest.raises(ReplicaLostError, match=r"ended 3 times and answered nothing between"):
            llm.generate([[5, 6, 7]], deadly, use_tqdm=False)
        with pytest.raises(EngineClosedError):
            llm.generate([[5, 6, 7]], use_tqdm=False)
    assert wait_until(lambda: not called("ray::Replica"), 10)


def _end_the_process(*_: Any) -> Any:
    os._exit(3)


@pytest.mark.slow
def test_an_engine_that_hangs_is_lost(tiny: Path) -> None:
    import signal

    prompts = many_prompts(40)
    connect()
    with LLM(str(tiny), **ARGUMENTS) as llm:
        expected = sampled(llm, prompts, 60)
    with LLM(str(tiny), **ON_RAY, **ARGUMENTS, distributed_timeout_seconds=3) as llm:
        os.kill(min(called("ray::Replica")), signal.SIGSTOP)
        assert sampled(llm, prompts, 60) == expected
        assert llm.engine.num_restarts == 1


@pytest.mark.slow
def test_engines_of_two_workers_each(tiny: Path) -> None:
    prompts = many_prompts(20)
    connect()
    with LLM(str(tiny), **ARGUMENTS) as llm:
        expected = sampled(llm, prompts, 20)
    with LLM(str(tiny), **ON_RAY, **ARGUMENTS, tensor_parallel_size=2) as llm:
        assert sampled(llm, prompts, 20) == expected


@pytest.mark.slow
def test_what_an_engine_refuses_is_raised_here(tiny: Path) -> None:
    connect()
    with pytest.raises(ConfigError, match="max_model_len=4096"):
        LLM(str(tiny), **ON_RAY, **{**ARGUMENTS, "max_model_len": 4096})
    assert wait_until(lambda: not called("ray::Replica"), 10)
