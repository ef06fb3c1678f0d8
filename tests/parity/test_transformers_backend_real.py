"""Gemma 3 270M, SmolLM2 135M and Qwen2.5-Coder 0.5B, real weights by transformers' code on lamella's attention: greedy
tokens and the gaps of the two likeliest equal those of transformers alone, which the fixtures of the native tests hold.
"""

from __future__ import annotations

import pytest

from tests.parity.decoder_checks import medium_cases, open_model, short_cases
from tests.parity.decoder_models import FIXTURES, qwen2_path
from tests.parity.greedy_run import check_cold_and_cached, compare_gaps, runner
from tests.parity.harness import ParityCase, compare_greedy, load_cases

FIXTURE_OF = {
    "demo:gemma-3-270m": "gemma_parity.json",
    "demo:smollm2-135m": "smollm2_parity.json",
    "qwen2": "qwen2_parity.json",
}
DEMO_MODELS = [model for model in FIXTURE_OF if model.startswith("demo:")]
# More than one window of Gemma's 512 tokens, and short ones.
NUM_LONG = 2


def cases_of(model: str) -> list[ParityCase]:
    return load_cases(FIXTURES / FIXTURE_OF[model])


def opened(model: str, **arguments):
    path = str(qwen2_path()) if model == "qwen2" else model
    return open_model(path, model_impl="transformers", **arguments)


@pytest.mark.slow  # reading the file by transformers' code takes half a minute
@pytest.mark.timeout(1800)
def test_a_short_prompt_gives_transformers_tokens():
    shortest = min(cases_of("demo:smollm2-135m"), key=lambda case: len(case.prompt_token_ids))
    seen: list[object] = []
    with opened("demo:smollm2-135m", max_model_len=256, kv_cache_memory_bytes=64 << 20) as llm:
        compare_greedy(runner(llm, seen=seen), [shortest])
    compare_gaps([shortest], seen)


def check(model: str) -> None:
    cases = cases_of(model)
    longest = sorted(cases, key=lambda case: len(case.prompt_token_ids))[-NUM_LONG:]
    with opened(model, max_model_len=4096) as llm:
        check_cold_and_cached(llm, [*short_cases(cases)[::3], *medium_cases(cases)[:2], *longest])
    with opened(model, max_num_batched_tokens=32) as llm:
        compare_greedy(runner(llm, batch=3), short_cases(cases)[1::4])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", DEMO_MODELS)
def test_prompts_of_all_lengths_cold_and_cached(model):
    check(model)


@pytest.mark.external
@pytest.mark.timeout(1800)
def test_a_file_of_qwen2():
    check("qwen2")
