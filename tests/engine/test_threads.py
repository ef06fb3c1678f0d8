"""Several threads share an engine: calls queue, `close` ends what runs, and nobody waits longer than a step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lamella import LLM, Engine, EngineClosedError, LamellaError, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 512, "kv_cache_memory_bytes": 2**23, "max_num_seqs": 4, "check_invariants": True}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = [list(range(10 + 3 * index, 30 + 4 * index)) for index in range(6)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


def in_thread(function):
    """(thread, list of what it raised): runs `function` in a thread of its own."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def wait_for_steps(engine, num_steps):
    while engine.stats().num_steps < num_steps:
        pass


def greedy(model, prompt, num_tokens):
    ids = torch.tensor([prompt])
    made = model.generate(ids, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


def test_calls_of_generate_from_several_threads_queue(saved):
    folder, model = saved
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12)
    wanted = [greedy(model, prompt, 12) for prompt in PROMPTS]
    with LLM(folder, **ARGUMENTS) as llm, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, PROMPTS[index:], params, use_tqdm=False) for index in (0, 1, 2, 3, 4, 5) * 2]
        for call, index in zip(calls, (0, 1, 2, 3, 4, 5) * 2, strict=True):
            assert [list(output.outputs[0].token_ids) for output in call.result()] == wanted[index:]
        assert llm.engine.num_unfinished_requests == 0


def test_close_ends_a_generate_of_another_thread_and_those_that_wait(saved):
    llm = LLM(saved[0], **ARGUMENTS)
    running = in_thread(lambda: llm.generate(PROMPTS, LONG, use_tqdm=False))
    wait_for_steps(llm.engine, 3)
    waiting = in_thread(lambda: llm.generate(PROMPTS, LONG, use_tqdm=False))
    llm.close()
    for thread, raised in (running, waiting):
        thread.join()
        assert [type(error) for error in raised] == [EngineClosedError]


def test_close_ends_a_loop_of_steps_of_another_thread(saved):
    engine = Engine(model=saved[0], **ARGUMENTS)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, LONG)

    def loop():
        while True:
            engine.step()

    thread, raised = in_thread(loop)
    wait_for_steps(engine, 3)
    engine.close()
    thread.join()
    assert [type(error) for error in raised] == [EngineClosedError]
    assert not engine.has_unfinished_requests()


def test_requests_are_added_and_aborted_while_another_thread_steps(saved):
    """Each output equals transformers', whichever requests came and went meanwhile."""
    folder, model = saved
    outputs, is_over = {}, threading.Event()
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12)
    with Engine(model=folder, **ARGUMENTS) as engine:

        def loop():
            while not is_over.is_set() or engine.has_unfinished_requests():
                outputs.update({output.request_id: output for output in engine.step() if output.finished})

        thread, raised = in_thread(loop)
        for index in range(60):
            engine.add_request(str(index), PROMPTS[index % 6], params)
            if index % 3 == 2:
                engine.abort(str(index - 1))
        is_over.set()
        thread.join()
        assert raised == []
        engine.check_invariants()
    wanted = [greedy(model, prompt, 12) for prompt in PROMPTS]
    for index in range(60):
        if index % 3 != 1:
            assert list(outputs[str(index)].outputs[0].token_ids) == wanted[index % 6]


def test_steps_of_another_thread_in_the_midst_of_generate_are_named(saved):
    with LLM(saved[0], **ARGUMENTS) as llm:
        thread, raised = in_thread(lambda: llm.generate(PROMPTS, LONG, use_tqdm=False))
        wait_for_steps(llm.engine, 1)
        while llm.engine.has_unfinished_requests():
            llm.engine.abort([f"llm-{index}" for index in range(6)])
        thread.join()
        assert [type(error) for error in raised] == [LamellaError]
        assert "while generate ran" in str(raised[0])
