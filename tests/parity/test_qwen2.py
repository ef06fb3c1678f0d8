"""Qwen2.5-Coder 0.5B, real weights in float32: greedy tokens equal transformers' on every prompt; and the same weights
as a hybrid, whose layers from the twelfth on have a window of 64.

The oracle's tokens and top-2 logit gaps are fixtures (make_decoder_fixture.py). The file of the weights is to be given
(README.md), so the tests are marked `external`.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.parity.decoder_checks import (
    VARIATIONS,
    WINDOW_VARIATIONS,
    check_preemption,
    check_variation,
    open_model,
    short_cases,
)
from tests.parity.decoder_models import FIXTURES, qwen2_path, write_folder
from tests.parity.greedy_run import check_cold_and_cached
from tests.parity.harness import load_cases
from tests.parity.make_fixture import sha256_of

pytestmark = [pytest.mark.external, pytest.mark.timeout(1800)]

CASES = load_cases(FIXTURES / "qwen2_parity.json")
HYBRID = load_cases(FIXTURES / "qwen2_hybrid_parity.json")
# 24,576 bytes of KV a token: some 340 tokens in all, for prompts of 80 to 200 with their answers.
SMALL_POOL = {"kv_cache_memory_bytes": 8 * 2**20, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def model():
    return str(qwen2_path())


def test_the_file_is_the_one_that_the_fixtures_were_made_from():
    sha256 = sha256_of(qwen2_path())
    for name in ("qwen2_parity.json", "qwen2_hybrid_parity.json"):
        assert json.loads((FIXTURES / name).read_text(encoding="utf-8"))["model_sha256"] == sha256


def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache(model):
    with open_model(model) as llm:
        check_cold_and_cached(llm, CASES)


@pytest.mark.parametrize("arguments", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_variations(model, arguments):
    check_variation(model, CASES, **arguments)


def test_a_pool_so_small_that_requests_are_preempted(model):
    check_preemption(model, short_cases(CASES)[::2], **SMALL_POOL)


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory):
    """Two and a half gigabytes: it goes when the module is done."""
    folder = tmp_path_factory.mktemp("qwen2")
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 12}
    yield str(write_folder(qwen2_path(), folder / "hybrid", **changes))
    shutil.rmtree(folder)


def test_a_hybrid_cold_and_cached(hybrid_folder):
    with open_model(hybrid_folder) as llm:
        check_cold_and_cached(llm, HYBRID, finds_all=False)


@pytest.mark.parametrize("arguments", WINDOW_VARIATIONS.values(), ids=WINDOW_VARIATIONS.keys())
def test_a_hybrid_in_variations(hybrid_folder, arguments):
    check_variation(hybrid_folder, HYBRID, **arguments)


def test_a_hybrid_with_preemption(hybrid_folder):
    """Room for about two of the prompts, but for the longest; by the order that leaves none for the outputs."""
    pool = {"kv_cache_memory_bytes": 24 * 2**20, "max_num_batched_tokens": 512, "max_model_len": 800}
    cases = [case for case in HYBRID if len(case.prompt_token_ids) < 700]
    check_preemption(hybrid_folder, cases, scheduling_policy="fcfs", **pool)
