"""Penalties in a whole engine, against transformers' logits changed token by token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lamella import Engine, SamplingParams
from lamella.engine.scheduling.token_penalties import penalised_prompt_ids, token_penalties
from lamella.model_executor.sampling.sampler import uniform
from tests.helpers.preempting import run_batch
from tests.helpers.sampling_oracle import distribution, penalised
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_TOKENS = 12
ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "check_invariants": True}
SHORT = {"repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "frequency"}
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_k": 6, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": -0.3},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


def prompt_of(index: int) -> list[int]:
    return np.random.default_rng(index).integers(6, 320, size=10 + index).tolist()


def expected_tokens(model: Any, prompt: list[int], params: dict[str, Any]) -> list[int]:
    """One forward of the whole sequence per token. Close calls are an AssertionError."""
    output: list[int] = []
    penalties = {SHORT[name]: value for name, value in params.items() if name in SHORT}
    for draw_index in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].numpy()
        changed = penalised(logits, prompt, output, **penalties)
        if params["temperature"] == 0:
            second, best = np.sort(changed)[-2:]
            assert best - second > 1e-4
            output.append(int(changed.argmax()))
        else:
            of_row = distribution(changed, temperature=params["temperature"], top_k=params.get("top_k", 0))
            number = uniform(params["seed"], draw_index)
            assert np.abs(of_row.ends[:-1] - number).min() > 1e-5
            output.append(of_row.pick(number))
    return output


@pytest.fixture(scope="module")
def expected(tiny):
    return [expected_tokens(tiny[1], prompt_of(index), params) for index, params in enumerate(CASES)]


def run(engine: Engine, preempted_after: int | None = None) -> list[list[int]]:
    """The tokens of all cases in one batch."""
    made = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params) for params in CASES]
    return run_batch(engine, [(prompt_of(index), params) for index, params in enumerate(made)], preempted_after)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tokens_are_those_of_the_oracle_in_a_mixed_batch(tiny, expected, backend: str) -> None:
    with Engine(model=tiny[0], dtype="float32", attention_backend=backend, **ARGUMENTS) as engine:
        assert run(engine) == expected
    assert all(len(set(tokens)) == NUM_TOKENS for tokens in expected[2:3])  # nothing comes twice


def test_a_resumed_requests_penalties_are_those_of_its_tokens(tiny, expected) -> None:
    with Engine(model=tiny[0], dtype="float32", **ARGUMENTS) as engine:
        assert run(engine, preempted_after=6) == expected
        assert engine.stats().num_preemptions == len(CASES)


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.5])
@pytest.mark.parametrize("num_output", [0, 1, 40])
def test_each_token_is_named_once_with_its_count_in_the_output(repetition_penalty: float, num_output: int) -> None:
    generator = np.random.default_rng(num_output)
    prompt, output = generator.integers(0, 30, size=20), generator.integers(15, 45, size=num_output)
    params = SamplingParams(repetition_penalty=repetition_penalty, presence_penalty=0.5, frequency_penalty=0.25)
    made = token_penalties(params, penalised_prompt_ids(params, prompt.astype(np.int32)), output.astype(np.int32))
    counts = Counter({int(token_id): 0 for token_id in (prompt if repetition_penalty != 1.0 else [])})
    counts.update(output.tolist())
    assert len(made.token_ids) == len(counts)
    assert dict(zip(made.token_ids.tolist(), made.output_counts.tolist(), strict=True)) == dict(counts)
    assert (made.token_ids.dtype, made.output_counts.dtype) == (np.int64, np.int64)
    assert (made.repetition, made.presence, made.frequency) == (repetition_penalty, 0.5, 0.25)
