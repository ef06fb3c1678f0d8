"""Engines whose layers several processes compute: the tokens of one process, and an end when one of them ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella import LLM, SamplingParams
from lamella.distributed.ray_cluster import connect
from lamella.errors import ConfigError, EngineClosedError, RequestError, WorkerLostError
from tests.helpers.parallel_models import SHAPES, Prompts
from tests.helpers.processes import called, children_of, wait_until
from tests.helpers.random_models import save_random_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.parity.greedy_run import runner
from tests.parity.harness import ParityCase, compare_greedy

NUM_TOKENS = 16
ARGUMENTS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 2**22,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,  # so that long prompts come in chunks
    "check_invariants": True,
}
PROMPTS = Prompts.drawn(0, (1, 5, 33, 100)).token_ids
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def cases_of(llm: LLM) -> list[ParityCase]:
    """What one process says, with the gaps between its two likeliest tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    cases = []
    for index, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False)):
        gaps = []
        for entry in output.outputs[0].logprobs or []:
            first, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
            gaps.append(first - second)
        cases.append(ParityCase(str(index), tuple(PROMPTS[index]), tuple(output.outputs[0].token_ids), tuple(gaps)))
    return cases


def logprobs_of(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    return [
        [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs or []]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


def check_tokens(folder: Path, num_workers: int, backend: str, **arguments: Any) -> None:
    """Cold and cached, in a batch and alone, and with steps planned ahead."""
    with LLM(str(folder), attention_backend=backend, **ARGUMENTS) as llm:
        cases = cases_of(llm)
    with LLM(
        str(folder), tensor_parallel_size=num_workers, attention_backend=backend, **{**ARGUMENTS, **arguments}
    ) as llm:
        assert llm.engine.attention_backend == backend
        for _ in range(2):
            compare_greedy(runner(llm), cases)
        if backend == "native":  # the same bits, whatever the batch
            together = logprobs_of(llm, PROMPTS)
            llm.reset_prefix_cache()
            assert [logprobs_of(llm, [prompt])[0] for prompt in PROMPTS] == together


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    SHAPES[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(folder, num_hidden_layers=2, sliding_window_pattern=2)
    return folder


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray's own stay until this process ends."""
    if "ray" in request.node.name:
        connect()
    before = children_of(os.getpid())
    yield
    assert wait_until(lambda: children_of(os.getpid()) <= before, 5)


def test_two_workers_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Experts, biases, sinks and two KV heads, on the native path."""
    SHAPES["gpt_oss"](tmp_path)
    check_tokens(tmp_path, 2, "native", async_scheduling=True)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["mp", "ray"])
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_every_shape(shape: Path, num_workers: int, backend: str, executor: str) -> None:
    """With 4 workers more than there are KV heads, which some of them then have alike."""
    check_tokens(
        shape,
        num_workers,
        backend,
        distributed_executor_backend=executor,
        ray_actor_options={"num_cpus": 0},
    )


def test_what_cannot_be_cut_is_refused_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    save_random_model(tmp_path, "olmo3", 0)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (tiny, {"tensor_parallel_size": 3}, r"tensor_parallel_size=3: .*num_heads=4 is not a multiple"),
        (tiny, {"enable_lora": True}, "adapters are not cut"),
        (tiny, {"quantization": "int8"}, "quantization='int8'"),
        (tiny, {"speculative_config": {"method": "suffix"}}, "speculative_config"),
        (tiny, {"model_impl": "transformers"}, "native families"),
        (tiny, {"distributed_executor_backend": "slurm"}, "distributed_executor_backend='slurm'"),
        (tmp_path, {}, "normed as whole rows"),
    ]
    before = children_of(os.getpid())
    for folder, arguments, told in refused:
        with pytest.raises(ConfigError, match=told):
            LLM(str(folder), **{"tensor_parallel_size": 2, **ARGUMENTS, **arguments})
        assert children_of(os.getpid()) == before


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(PROMPTS * 4, LONG, use_tqdm=False)


def end_in_mid_batch(llm: LLM, process_id: int, sent: signal.Signals, after_seconds: float) -> float:
    """Seconds from the signal to the engine's error."""
    ended = []

    def end() -> None:
        time.sleep(after_seconds)
        os.kill(process_id, sent)
        ended.append(time.monotonic())

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(WorkerLostError, match="tensor-parallel worker"):
        generate_for_ever(llm)
    took = time.monotonic()
    thread.join()
    return took - ended[0]


def test_a_worker_that_is_killed_ends_its_engine(tiny: Path) -> None:
    before = children_of(os.getpid())
    with LLM(str(tiny), tensor_parallel_size=2, **ARGUMENTS) as llm:
        (worker,) = children_of(os.getpid()) - before
        with pytest.raises(RequestError, match="tensor_parallel_size=2"):
            llm.save_prefix(tiny / "prefix", PROMPTS[2])
        assert end_in_mid_batch(llm, worker, signal.SIGKILL, 0.3) < 10
        with pytest.raises(EngineClosedError):
            llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["mp", "ray"])
@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_is_killed_at_any_moment(tiny: Path, seed: int, executor: str) -> None:
    arguments = {**ARGUMENTS, "distributed_executor_backend": executor, "ray_actor_options": {"num_cpus": 0}}
    delay = random.Random(seed).uniform(0, 2)

    def workers() -> set[int]:
        return children_of(os.getpid()) if executor == "mp" else called("ray::_Actor.serve")

    before = workers()
    with LLM(str(tiny), tensor_parallel_size=2, **arguments) as llm:
        assert wait_until(lambda: len(workers() - before) == 1, 10)
        (worker,) = workers() - before
        assert end_in_mid_batch(llm, worker, signal.SIGKILL, delay) < 10
    assert wait_until(lambda: workers() <= before, 10)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_its_engine(tiny: Path) -> None:
    before = children_of(os.getpid())
    with LLM(str(tiny), tensor_parallel_size=2, distributed_timeout_seconds=1, **ARGUMENTS) as llm:
        (worker,) = children_of(os.getpid()) - before
        assert end_in_mid_batch(llm, worker, signal.SIGSTOP, 0.2) < 20


@pytest.mark.slow
@pytest.mark.parametrize("delay_seconds", [0.0, 0.5, 1.5])
def test_a_worker_that_ends_while_it_loads(tiny: Path, delay_seconds: float) -> None:
    before = children_of(os.getpid())

    def end() -> None:
        assert wait_until(lambda: len(children_of(os.getpid()) - before) == 1, 10)
        time.sleep(delay_seconds)
        for worker in children_of(os.getpid()) - before:
            os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=end)
    thread.start()
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match="killed by SIGKILL"):
        LLM(str(tiny), tensor_parallel_size=2, **ARGUMENTS).generate(PROMPTS * 20, LONG, use_tqdm=False)
    assert time.monotonic() - started < 30
    thread.join()


_SCRIPT = """
import sys, time
from lamella import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_model_len=256, kv_cache_memory_bytes=2**22, max_num_seqs=8)
print("loaded", flush=True)
while True:
    llm.generate([[5, 6, 7]] * 8, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_engines_process(tiny: Path, sent: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tiny)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"loaded\n"
        workers = children_of(script.pid)
        assert len(workers) == 1
        time.sleep(0.2)
        script.send_signal(sent)
        script.wait(20)
        left = {worker: Path(f"/proc/{worker}") for worker in workers}
        assert wait_until(lambda: not any(path.exists() for path in left.values()), 10)
