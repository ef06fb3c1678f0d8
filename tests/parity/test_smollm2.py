"""SmolLM2 135M, a Llama, real weights in float32: greedy tokens equal transformers' on every prompt; and the same
weights as a Mistral whose layers all have a window of 64.

The oracle's tokens and top-2 logit gaps are fixtures (make_decoder_fixture.py).
"""

from __future__ import annotations

import shutil

import pytest

from lamella import LLM
from lamella.model_executor.weights.loading import resolve_model
from tests.parity.decoder_models import FIXTURES, write_folder
from tests.parity.greedy_run import check_cold_and_cached, compare_gaps, runner
from tests.parity.harness import compare_greedy, load_cases

CASES = load_cases(FIXTURES / "smollm2_parity.json")
SHORT = [case for case in CASES if len(case.prompt_token_ids) < 200]
MEDIUM = [case for case in CASES if 200 < len(case.prompt_token_ids) < 1000]
FEW = [*MEDIUM[:1], *SHORT[::4]]
WINDOWED = load_cases(FIXTURES / "smollm2_window_parity.json")
MODEL = "demo:smollm2-135m"
# 46,080 bytes of KV a token: some 360 tokens in all, for prompts of 80 to 200 with their answers.
SMALL_POOL = {"kv_cache_memory_bytes": 16 * 2**20, "max_num_batched_tokens": 64, "max_model_len": 256}


def engine(model: str = MODEL, **arguments):
    return LLM(model, **{"max_model_len": 2560, "kv_cache_memory_bytes": 2**29, "max_num_seqs": 32, **arguments})


def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache():
    with engine() as llm:
        check_cold_and_cached(llm, CASES)


VARIATIONS = {
    "chunk 32": {"max_num_batched_tokens": 32},
    "page 1": {"page_size": 1},
    "page 64, chunk 512": {"page_size": 64, "max_num_batched_tokens": 512},
    "torch": {"attention_backend": "torch"},
}


@pytest.mark.parametrize("arguments", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_variations(arguments):
    with engine(**arguments) as llm:
        compare_greedy(runner(llm), FEW)


def test_batch_of_one():
    with engine(max_num_seqs=1) as llm:
        compare_greedy(runner(llm, batch=1), FEW[1:4])


def test_a_pool_so_small_that_requests_are_preempted():
    with engine(**SMALL_POOL) as llm:
        compare_greedy(runner(llm), SHORT[::2])
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_every_variation_on_all_prompts(arguments):
    with engine(**arguments) as llm:
        compare_greedy(runner(llm), CASES)


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory):
    """Half a gigabyte: it goes when the module is done."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield write_folder(resolve_model(MODEL).paths[0], folder / "window", sliding_window=64)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_windows_in_every_layer_cold_and_cached(window_folder):
    with engine(str(window_folder)) as llm:
        outputs = []
        compare_greedy(runner(llm, seen=outputs), WINDOWED)
        compare_gaps(WINDOWED, outputs)
        cached_before = llm.engine.stats().num_cached_tokens
        compare_greedy(runner(llm), WINDOWED)
        assert llm.engine.stats().num_cached_tokens > cached_before


WINDOW_VARIATIONS = {
    "chunk 32": {"max_num_batched_tokens": 32},
    "page 1, interval 1": {"page_size": 1, "swa_eviction_interval": 1},
    "page 64, interval 128": {"page_size": 64, "swa_eviction_interval": 128},
    "no sliding": {"disable_hybrid_kv_cache": True},
    "torch": {"attention_backend": "torch"},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", WINDOW_VARIATIONS.values(), ids=WINDOW_VARIATIONS.keys())
def test_windows_in_every_layer_in_variations(window_folder, arguments):
    with engine(str(window_folder), **arguments) as llm:
        compare_greedy(runner(llm), WINDOWED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_windows_in_every_layer_in_a_pool_smaller_than_a_prompt(window_folder):
    """227 tokens of KV for prompts of 332 to 591: what leaves the windows is used again, by whoever waits."""
    pool = {"kv_cache_memory_bytes": 10 * 2**20, "max_num_batched_tokens": 256, "max_model_len": 800}
    cases = [case for case in WINDOWED if len(case.prompt_token_ids) < 600][:6]
    with engine(str(window_folder), **pool) as llm:
        compare_greedy(runner(llm), cases)
