"""A whole engine with the device's sampler gives the tokens that it gives with the host's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella import LLM, SamplingParams
from lamella.model_executor import runner
from lamella.model_executor.sampling.device.device_sampler import DeviceSampler
from tests.helpers.tiny_gemma import save_tiny_gemma

PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=2, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=1.2, seed=2, max_tokens=2, top_k=9, top_p=0.9, min_tokens=2, suppress_tokens=[5]),
    SamplingParams(temperature=0.9, seed=3, max_tokens=2, allowed_token_ids=[9, 8, 7], logit_bias={8: 3.0}),
]
PROMPTS = [[7, 8, 9, 10], [30] * 5, [100, 5, 61], [11, 12]]


def test_tokens_and_logprobs_of_a_mixed_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_gemma(tmp_path, num_hidden_layers=3)
    arguments = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "dtype": "float32", "attention_backend": "torch"}
    with LLM(str(tmp_path), **arguments) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    samplers = []

    def choose_sampler(device: object) -> DeviceSampler:
        samplers.append(DeviceSampler(512))
        return samplers[-1]

    monkeypatch.setattr(runner, "choose_sampler", choose_sampler)
    with LLM(str(tmp_path), **arguments) as llm:
        actual = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.engine.inspect().runner.sampler is samplers[0]
    for one, other in zip(actual, expected, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
    found, wanted = ([*output.prompt_logprobs[1:], *output.outputs[0].logprobs] for output in (actual[0], expected[0]))
    assert len(found) == 3 + 3
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        assert [entry.rank for entry in one.values()] == [entry.rank for entry in other.values()]
        for token_id in one:
            assert one[token_id].logprob == pytest.approx(other[token_id].logprob, abs=2e-6)
