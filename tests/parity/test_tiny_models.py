"""Small random Gemma 3 models from Hugging Face folders: greedy tokens equal transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.step_page_watch import watch_step_pages
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder, and prompts up to seven windows deep with the oracle's greedy tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny_gemma(folder)
    generator = np.random.default_rng(3)
    lengths = (1, 2, 5, 15, 16, 17, 33, 64, 100, 115)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in lengths]
    prompts.append([*prompts[-1][:70], *generator.integers(6, 320, size=20).tolist()])
    return folder, prompts, [oracle_tokens(model, prompt) for prompt in prompts]


def oracle_tokens(model, prompt: list[int]) -> list[int]:
    """One full forward pass per token: no cache that could be wrong."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(folder, prompts, **engine_arguments):
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 16, **engine_arguments}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), check_invariants=True, **arguments) as llm:
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        stats = llm.engine.stats()
    return [[list(output.outputs[0].token_ids) for output in run] for run in outputs], outputs, stats


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_backend": "reference"},
        {"page_size": 1},
        {"page_size": 3, "swa_eviction_interval": 7},
        {"page_size": 64},
        {"max_num_seqs": 8, "max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 37},
        {"max_num_seqs": 1},
        {"swa_eviction_interval": 1},
        {"swa_eviction_interval": 50},
        {"enable_prefix_caching": False},
        {"disable_hybrid_kv_cache": True},
    ],
    ids=lambda arguments: "-".join(f"{key}={value}" for key, value in arguments.items()) or "default",
)
def test_greedy_tokens_equal_the_oracle(tiny, arguments):
    folder, prompts, expected = tiny
    runs, outputs, _ = generate(folder, prompts, **arguments)
    assert runs[0] == expected
    assert runs[1] == expected, "the second time from the prefix cache"
    hits = [output.num_cached_tokens for output in outputs[1]]
    if arguments.get("enable_prefix_caching", True):
        assert hits == [len(prompt) - 1 for prompt in prompts]
    else:
        assert hits == [0] * len(prompts)


def test_greedy_tokens_equal_the_oracle_under_preemption(tiny):
    folder, prompts, expected = tiny
    layer_bytes = 2 * 2 * 16 * 4  # K and V, 2 heads, 16 dims, float32
    one_request = 256 * 6 * layer_bytes
    runs, _, stats = generate(folder, prompts, kv_cache_memory_bytes=one_request, max_num_batched_tokens=32)
    assert runs[0] == expected
    assert runs[1] == expected
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_greedy_tokens_equal_the_oracle_with_step_pages(tiny, backend, page_size):
    """Memory said never to idle, and NaN in the region where layer after layer writes."""
    folder, prompts, expected = tiny
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 16}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), check_invariants=True, attention_backend=backend, page_size=page_size, **arguments) as llm:
        num_tokens = watch_step_pages(llm.engine)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        # Of a prompt of 115 tokens all but the window of 16, two blocks and what is left of one.
        assert sum(num_tokens) >= 115 - 16 - 3 * page_size


def test_a_full_attention_only_and_a_sliding_only_model(tmp_path):
    """The one-group cases of the same code."""
    prompt = [7 + i % 300 for i in range(90)]
    for kind in ("full_attention", "sliding_attention"):
        folder = tmp_path / kind
        model = save_tiny_gemma(folder, layer_types=[kind] * 6)
        runs, outputs, _ = generate(folder, [prompt])
        assert runs == [[oracle_tokens(model, prompt)]] * 2
        assert outputs[1][0].num_cached_tokens == 89


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_models_stay_close(tiny, dtype):
    """16-bit rounding may flip near ties, so only the first token of each prompt is compared, where the
    oracle's margin is clear."""
    folder, prompts, expected = tiny
    runs, _, _ = generate(folder, prompts, dtype=dtype)
    first = [tokens[0] for tokens in runs[0]]
    agreeing = sum(ours == theirs[0] for ours, theirs in zip(first, expected, strict=True))
    assert agreeing >= len(prompts) - 1
