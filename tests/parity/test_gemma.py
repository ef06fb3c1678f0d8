"""Gemma 3 270M, real weights in float32: greedy tokens equal transformers' on every prompt.

The oracle's tokens and its top-2 logit gaps are a fixture (make_fixture.py). Every variation here leaves
the mathematics alone, so each must give the same tokens.
"""

from __future__ import annotations

import pytest

from lamella import LLM, SamplingParams
from lamella.native.library import load_library
from tests.helpers.step_page_watch import watch_step_pages
from tests.parity.greedy_run import check_cold_and_cached, runner
from tests.parity.harness import compare_greedy, load_cases

CASES = load_cases()
LONG = [case for case in CASES if len(case.prompt_token_ids) > 1500]
SHORT = [case for case in CASES if len(case.prompt_token_ids) < 200]
# Of the long ones one, for `make test`; `make test-full` runs all.
BATCH = [*SHORT, *LONG[:1]]
# A long prompt, for one variation, and short ones, for each: on all prompts they take minutes. Small pages in windows
# are in test_tiny_models.py.
FEW = [*LONG[:1], *SHORT[::4]]
# Little more than one request of 2,700 tokens needs.
SMALL_POOL = {"kv_cache_memory_bytes": 56 * 2**20, "max_num_batched_tokens": 256, "max_model_len": 2700}


def engine(**arguments):
    defaults = {"max_model_len": 4096, "kv_cache_memory_bytes": 2**30, "max_num_seqs": 32}
    return LLM("demo:gemma-3-270m", **{**defaults, **arguments})


def test_the_fixture_is_what_it_should_be():
    assert len(CASES) >= 24
    assert len(LONG) >= 6
    assert all(len(case.token_ids) == 48 for case in CASES)


@pytest.mark.parametrize(
    "cases", [BATCH, pytest.param(CASES, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["most", "all"]
)
def test_prompts_in_one_batch_and_again_from_the_prefix_cache(cases):
    with engine() as llm:
        check_cold_and_cached(llm, cases)


VARIATIONS = {
    "page 1, interval 1": {"page_size": 1, "swa_eviction_interval": 1},
    "page 64, interval 128, chunk 512": {
        "page_size": 64,
        "swa_eviction_interval": 128,
        "max_num_batched_tokens": 512,
    },
    "chunk 32": {"max_num_batched_tokens": 32},
}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, id=name, marks=[] if name == "chunk 32" else [pytest.mark.slow])
        for name, arguments in VARIATIONS.items()
    ],
)
def test_variations(arguments):
    with engine(**arguments) as llm:
        compare_greedy(runner(llm), FEW if arguments.get("page_size") == 64 else FEW[1:])


@pytest.mark.slow
def test_batch_of_one():
    with engine(max_num_seqs=1) as llm:
        compare_greedy(runner(llm, batch=1), FEW[1:4])


def test_a_pool_so_small_that_requests_are_preempted():
    with engine(kv_cache_memory_bytes=16 * 2**20, max_num_batched_tokens=64, max_model_len=256) as llm:
        compare_greedy(runner(llm), SHORT[::2])
        assert llm.engine.stats().num_preemptions > 0


def test_long_prompts_in_chunks_with_step_pages():
    """Window 512, chunks of 1,024, memory said never to idle: all of a chunk but the window at its end and a block
    more, in whole blocks, shares the memory of one layer."""
    with engine(max_num_batched_tokens=1024) as llm:
        num_tokens = watch_step_pages(llm.engine)
        compare_greedy(runner(llm, batch=1), LONG[:1])
        assert max(num_tokens) == 1024 - 16 - 512


FULL_MATRIX = {
    "page 1": {"page_size": 1},
    "page 64": {"page_size": 64},
    "chunk 32": {"max_num_batched_tokens": 32},
    "chunk 512": {"max_num_batched_tokens": 512},
    "interval 1": {"swa_eviction_interval": 1},
    "interval 128": {"swa_eviction_interval": 128},
    "small pool": SMALL_POOL,
    "batch of 24": {"max_num_seqs": 24},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", FULL_MATRIX.values(), ids=FULL_MATRIX.keys())
def test_every_variation_on_all_prompts(arguments):
    with engine(**arguments) as llm:
        compare_greedy(runner(llm), CASES)
        assert (llm.engine.stats().num_preemptions > 0) == (arguments is SMALL_POOL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_batch_of_one_on_all_prompts():
    with engine(max_num_seqs=1) as llm:
        compare_greedy(runner(llm, batch=1), CASES)


@pytest.mark.skipif(load_library() is None, reason="GGUF blocks are multiplied with by the native kernels")
def test_gguf_blocks_give_the_bits_of_float32_weights():
    """The file's own blocks and their float32 copy: log-probabilities are equal, float for float."""
    prompts = [case.prompt_token_ids for case in SHORT[:3]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4)
    found = []
    for quantization in (None, "gguf"):
        with engine(quantization=quantization) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(
            [
                [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
                for output in outputs
            ]
        )
    assert found[0] == found[1]
