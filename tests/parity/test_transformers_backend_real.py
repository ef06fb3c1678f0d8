"""Gemma 3 270M, SmolLM2 135M and Qwen2.5-Coder 0.5B, real weights by transformers' code on lamella's attention: greedy
tokens and the gaps of the two likeliest equal those of transformers alone, which the fixtures of the native tests hold.

Products here round by how many rows there are, so what is equal everywhere is tokens, but for near ties (`harness.py`),
and not bits. By default two short prompts run; `make test-full` runs all of them cold, cached, in chunks mixed with
decodes, preempted and with windows in their layers.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from lamella.model_executor.weights.loading import resolve_model
from tests.parity.decoder_checks import check_preemption, check_variation, medium_cases, open_model, short_cases
from tests.parity.decoder_models import FIXTURES, qwen2_path, write_folder
from tests.parity.greedy_run import check_cold_and_cached, compare_gaps, runner
from tests.parity.harness import ParityCase, compare_greedy, load_cases

GEMMA, SMOLLM2, QWEN2 = "demo:gemma-3-270m", "demo:smollm2-135m", "qwen2"
FIXTURE_OF = {GEMMA: "gemma_parity.json", SMOLLM2: "smollm2_parity.json", QWEN2: "qwen2_parity.json"}
# KV of some 350 tokens, for prompts of up to 150 with their answers.
SMALL_POOL_BYTES = {GEMMA: 16 << 20, SMOLLM2: 16 << 20, QWEN2: 8 << 20}
VARIATIONS = {
    "chunk 32": {"max_num_batched_tokens": 32},
    "page 1, interval 1": {"page_size": 1, "swa_eviction_interval": 1},
    "page 64, chunk 512": {"page_size": 64, "max_num_batched_tokens": 512},
    "torch's attention": {"attention_backend": "torch"},
}
all_models = pytest.mark.parametrize(
    "model",
    [
        pytest.param(GEMMA, marks=pytest.mark.slow),
        pytest.param(SMOLLM2, marks=pytest.mark.slow),
        pytest.param(QWEN2, marks=pytest.mark.external),
    ],
)
pytestmark = pytest.mark.timeout(1800)


def cases_of(model: str) -> list[ParityCase]:
    return load_cases(FIXTURES / FIXTURE_OF[model])


def path_of(model: str) -> str:
    return str(qwen2_path()) if model == QWEN2 else model


def few_cases(model: str) -> list[ParityCase]:
    """Short ones, one of a medium length where there is one, and the shortest of those that are longer than a window of
    Gemma's."""
    cases = sorted(cases_of(model), key=lambda case: len(case.prompt_token_ids))
    long = [case for case in cases if len(case.prompt_token_ids) > 1500]
    return [*short_cases(cases)[::4], *medium_cases(cases)[:1], *long[:1]]


BACKEND = {"model_impl": "transformers", "max_model_len": 4096}


def test_two_short_prompts_give_transformers_first_tokens():
    shortest = sorted(cases_of(SMOLLM2), key=lambda case: len(case.prompt_token_ids))[:2]
    cases = [replace(case, token_ids=case.token_ids[:16], gaps=case.gaps[:16]) for case in shortest]
    seen: list[object] = []
    settings = {"model_impl": "transformers", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
    with open_model(SMOLLM2, **settings) as llm:
        assert type(llm.engine.inspect().runner.model).__name__ == "TransformersModel"
        compare_greedy(runner(llm, seen=seen), cases)
    compare_gaps(cases, seen)


@all_models
def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache(model):
    with open_model(path_of(model), **BACKEND) as llm:
        check_cold_and_cached(llm, cases_of(model))


@all_models
@pytest.mark.parametrize("arguments", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_variations(model, arguments):
    check_variation(path_of(model), few_cases(model), **BACKEND, **arguments)


@all_models
def test_batch_of_one(model):
    check_variation(path_of(model), few_cases(model)[:2], batch=1, **BACKEND)


@all_models
def test_a_pool_so_small_that_requests_are_preempted(model):
    pool = {"kv_cache_memory_bytes": SMALL_POOL_BYTES[model], "max_num_batched_tokens": 64, "max_model_len": 256}
    check_preemption(path_of(model), short_cases(cases_of(model))[::2], **{**BACKEND, **pool})


WINDOWED = {
    SMOLLM2: ("smollm2_window_parity.json", {"sliding_window": 64}),
    QWEN2: ("qwen2_hybrid_parity.json", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 12}),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(SMOLLM2, marks=pytest.mark.slow), pytest.param(QWEN2, marks=pytest.mark.external)],
)
def windowed(request, tmp_path_factory):
    """A folder with the weights and a window in every layer, or in those from the twelfth on; its cases. The folder
    goes when the module is done."""
    fixture, changes = WINDOWED[request.param]
    source = qwen2_path() if request.param == QWEN2 else resolve_model(request.param).paths[0]
    folder = tmp_path_factory.mktemp("windowed")
    yield str(write_folder(source, folder / "model", **changes)), load_cases(FIXTURES / fixture)
    shutil.rmtree(folder)


def test_windows_cold_and_cached(windowed):
    folder, cases = windowed
    with open_model(folder, **BACKEND) as llm:
        check_cold_and_cached(llm, cases, finds_all=False)


def test_windows_in_chunks_and_small_pages(windowed):
    folder, cases = windowed
    check_variation(folder, cases[::3], **BACKEND, max_num_batched_tokens=32, page_size=1, swa_eviction_interval=1)
