"""Log-probabilities of a prompt's own tokens, against transformers' log-softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, Engine, RequestOutputKind, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {
    "max_model_len": 160,
    "kv_cache_memory_bytes": 2**22,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,  # long prompts come in chunks
    "page_size": 16,
    "check_invariants": True,
}
LONG = np.random.default_rng(1).integers(6, 320, size=100).tolist()
PROMPTS = [LONG, LONG[:40], np.random.default_rng(2).integers(6, 320, size=70).tolist(), [9]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


def assert_of_the_model(model: Any, tokenizer: Any, output: Any, num_top: int, start: int = 1) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    with torch.inference_mode():
        raw = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert len(found) == len(prompt)
    assert found[:start] == [None] * start
    for position in range(start, len(prompt)):
        expected, entry, token_id = raw[position - 1], found[position], prompt[position]
        assert entry[token_id].logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert entry[token_id].rank == 1 + int((expected > expected[token_id]).sum())
        assert entry[token_id].decoded_token == tokenizer.decode([token_id], False)
        top = expected.topk(num_top).indices.tolist()
        assert {*entry} == {token_id, *top}
        for rank, one in enumerate(top):
            assert (entry[one].rank, entry[one].logprob) == (rank + 1, pytest.approx(float(expected[one]), abs=1e-4))


def plain_of(num_top: int | None, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=num_top, **more)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_they_are_the_models_and_the_output_is_what_it_is_without(tiny, backend: str) -> None:
    with LLM(tiny[0], dtype="float32", attention_backend=backend, **ARGUMENTS) as llm:
        params = [plain_of(2), plain_of(0), plain_of(None), plain_of(3)]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output, num_top in ((outputs[0], 2), (outputs[1], 0), (outputs[3], 3)):
            assert_of_the_model(tiny[1], llm.get_tokenizer(), output, num_top)
        assert outputs[2].prompt_logprobs is None
        assert outputs[3].prompt_logprobs == [None]
        without = llm.generate(PROMPTS, plain_of(None), use_tqdm=False)
        assert [output.outputs for output in outputs] == [output.outputs for output in without]


def test_over_a_cached_prefix_they_are_computed_anew_and_equal(tiny) -> None:
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        assert llm.engine.attention_backend == "native"  # whose bits do not depend on what is cached
        first = llm.generate([LONG], plain_of(1), use_tqdm=False)[0]
        assert llm.generate([LONG], plain_of(None), use_tqdm=False)[0].num_cached_tokens >= 96
        again = llm.generate([LONG], plain_of(1), use_tqdm=False)[0]
        assert again.num_cached_tokens == 0
        assert again.prompt_logprobs == first.prompt_logprobs
        late = llm.generate([LONG], plain_of(1, prompt_logprob_start=70), use_tqdm=False)[0]
        assert 60 <= late.num_cached_tokens <= 69
        assert late.prompt_logprobs == [None] * 70 + first.prompt_logprobs[70:]
        assert late.outputs == first.outputs == again.outputs


def test_the_whole_vocabulary_may_be_asked_for(tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        output = llm.generate([LONG[:10]], params, use_tqdm=False)[0]
        assert_of_the_model(tiny[1], llm.get_tokenizer(), output, 320)
    with torch.inference_mode():
        tokens = LONG[:10] + output.outputs[0].token_ids
        raw = tiny[1](torch.tensor([tokens])).logits[0, 9:-1].double().log_softmax(-1)
    for entry, expected in zip(output.outputs[0].logprobs, raw, strict=True):
        assert len(entry) == 320
        found = [entry[token_id].logprob for token_id in range(320)]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
        assert sorted(one.rank for one in entry.values()) == list(range(1, 321))


@pytest.mark.parametrize("is_async", [False, True])
def test_after_preemption_in_the_middle_of_a_prompt(tiny, is_async: bool) -> None:
    with Engine(model=tiny[0], dtype="float32", async_scheduling=is_async, **ARGUMENTS) as engine:
        for index, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, plain_of(1))
        outputs, num_steps = {}, 0
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
            num_steps += 1
            if num_steps in (2, 5) and not is_async:
                scheduler = engine.inspect().scheduler
                for row in list(scheduler.running):
                    scheduler._preempt(row)
        assert engine.stats().num_preemptions == (0 if is_async else 4)
        for index in range(3):
            assert_of_the_model(tiny[1], engine.get_tokenizer(), outputs[str(index)], 1)


def test_of_n_samples_and_in_deltas_they_come_once(tiny) -> None:
    params = SamplingParams(
        n=2,
        seed=2,
        max_tokens=4,
        ignore_eos=True,
        prompt_logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )
    with Engine(model=tiny[0], dtype="float32", **ARGUMENTS) as engine:
        engine.add_request("a", {"prompt_token_ids": LONG[:50]}, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    given = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(outputs) > 3
    assert len(given) == 1
    assert [len(entry) for entry in given[0][1:]] == [1] * 49
    assert all(
        len(sample) == 4 for sample in zip(*[[s.token_ids for s in o.outputs] for o in outputs[-4:]], strict=True)
    )
