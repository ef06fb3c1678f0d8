"""SmolLM2 135M, a Llama, real weights in float32: greedy tokens equal transformers' on every prompt; and the same
weights as a Mistral whose layers all have a window of 64.

The oracle's tokens and top-2 logit gaps are fixtures (make_decoder_fixture.py). By default all prompts but the one that
takes longest run, and each way to load the model on a few; `make test-full` runs all on all.
"""

from __future__ import annotations

import shutil

import pytest

from lamella.model_executor.weights.loading import resolve_model
from tests.parity.decoder_checks import (
    VARIATIONS,
    WINDOW_VARIATIONS,
    check_preemption,
    check_variation,
    medium_cases,
    open_model,
    short_cases,
)
from tests.parity.decoder_models import FIXTURES, write_folder
from tests.parity.greedy_run import check_cold_and_cached
from tests.parity.harness import load_cases

CASES = load_cases(FIXTURES / "smollm2_parity.json")
SHORT, MEDIUM = short_cases(CASES), medium_cases(CASES)
FEW = [*MEDIUM[:1], *SHORT[::4]]
WINDOWED = load_cases(FIXTURES / "smollm2_window_parity.json")
MODEL = "demo:smollm2-135m"
# 46,080 bytes of KV a token: some 360 tokens in all, for prompts of 80 to 200 with their answers.
SMALL_POOL = {"kv_cache_memory_bytes": 16 * 2**20, "max_num_batched_tokens": 64, "max_model_len": 256}


def test_prompts_in_one_batch_and_again_from_the_prefix_cache():
    with open_model(MODEL) as llm:
        check_cold_and_cached(llm, [*SHORT, *MEDIUM])


@pytest.mark.slow
def test_a_pool_so_small_that_requests_are_preempted():
    check_preemption(MODEL, SHORT[::2], **SMALL_POOL)


@pytest.mark.slow
def test_batch_of_one():
    check_variation(MODEL, FEW[1:3], batch=1)


# One takes its prompts in small chunks and small pages, one in large ones and by other operators.
@pytest.mark.parametrize(
    "arguments",
    [
        VARIATIONS["chunk 32"] | VARIATIONS["page 1"],
        pytest.param(VARIATIONS["torch"] | VARIATIONS["page 64, chunk 512"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_variations(arguments):
    check_variation(MODEL, FEW[1:3], **arguments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache():
    assert len(CASES) == 24
    with open_model(MODEL) as llm:
        check_cold_and_cached(llm, CASES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_every_variation_on_all_prompts(arguments):
    check_variation(MODEL, CASES, **arguments)


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory):
    """Half a gigabyte: it goes when the module is done."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield str(write_folder(resolve_model(MODEL).paths[0], folder / "window", sliding_window=64))
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_windows_in_every_layer_cold_and_cached(window_folder):
    with open_model(window_folder) as llm:
        check_cold_and_cached(llm, WINDOWED, finds_all=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", WINDOW_VARIATIONS.values(), ids=WINDOW_VARIATIONS.keys())
def test_windows_in_every_layer_in_variations(window_folder, arguments):
    check_variation(window_folder, WINDOWED, **arguments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_windows_in_every_layer_in_a_pool_smaller_than_a_prompt(window_folder):
    """227 tokens of KV for prompts of 332 to 591: what leaves the windows is used again, by whoever waits."""
    pool = {"kv_cache_memory_bytes": 10 * 2**20, "max_num_batched_tokens": 256, "max_model_len": 800}
    check_variation(window_folder, [case for case in WINDOWED if len(case.prompt_token_ids) < 600][:6], **pool)
