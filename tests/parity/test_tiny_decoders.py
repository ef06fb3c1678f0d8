"""Small random models of Llama's shape: greedy tokens equal transformers', cold and cached, in chunks and at once."""

from __future__ import annotations

import numpy as np
import pytest

from lamella import LLM, SamplingParams
from tests.helpers.tiny_decoders import TINY_DECODERS, greedy_tokens, save_tiny_decoder

NUM_TOKENS = 16
BACKENDS = ("native", "torch")


@pytest.fixture(scope="module", params=TINY_DECODERS)
def tiny(request, tmp_path_factory):
    """A folder, and prompts up to six windows deep with the oracle's greedy tokens; two share a beginning."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny_decoder(folder, request.param)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in (1, 16, 17, 60, 100)]
    prompts.append([*prompts[-1][:70], *generator.integers(6, 320, size=20).tolist()])
    return folder, prompts, [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_num_batched_tokens": 24, "page_size": 16}, {"max_num_seqs": 1}, {"enable_prefix_caching": False}],
    ids=str,
)
def test_tokens_are_those_of_transformers(tiny, backend, arguments):
    folder, prompts, expected = tiny
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "attention_backend": backend}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), check_invariants=True, **{**settings, **arguments}) as llm:
        assert llm.engine.attention_backend == backend
        for _ in ("cold", "cached"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
    assert (cached > 0) == arguments.get("enable_prefix_caching", True)
