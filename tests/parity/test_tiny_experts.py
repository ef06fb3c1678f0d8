"""Small models with experts on the native path: tokens and log-probabilities equal transformers', and are the same bits
cold and cached, in chunks and at once, alone and in company, and with little memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.tiny_decoders import greedy_tokens
from tests.helpers.tiny_experts import TINY_EXPERTS, WINDOW, save_tiny_experts

NUM_TOKENS, NUM_LOGPROBS = 8, 4
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 24, "page_size": 16},
    {"max_num_seqs": 1, "enable_prefix_caching": False},
    {"kv_cache_memory_bytes": 2**19, "max_model_len": 96, "max_num_batched_tokens": 96},  # too little for all at once
]


@pytest.fixture(scope="module", params=TINY_EXPERTS)
def tiny(request, tmp_path_factory):
    """A folder, and prompts with the oracle's greedy tokens and their log-probabilities; two share a beginning."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny_experts(folder, request.param)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in LENGTHS]
    prompts.append([*prompts[-1][:40], *generator.integers(6, 320, size=20).tolist()])
    expected = []
    for prompt in prompts:
        tokens = greedy_tokens(model, prompt, NUM_TOKENS)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected.append((tokens, logits.log_softmax(-1)))
    return folder, prompts, expected


def test_the_same_bits_in_any_company(tiny):
    folder, prompts, expected = tiny
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "attention_backend": "native"}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_LOGPROBS)
    seen: dict[tuple[int, int], dict[int, float]] = {}
    for arguments in ARGUMENTS:
        with LLM(str(folder), check_invariants=True, **{**settings, **arguments}) as llm:
            assert llm.engine.attention_backend == "native"
            for _ in ("cold", "cached"):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                for index, (output, (tokens, logprobs)) in enumerate(zip(outputs, expected, strict=True)):
                    assert list(output.outputs[0].token_ids) == tokens
                    for place, step in enumerate(output.outputs[0].logprobs or ()):
                        found = {token: each.logprob for token, each in step.items()}
                        for token, value in found.items():
                            assert value == pytest.approx(logprobs[place, token].item(), abs=1e-4)
                        assert seen.setdefault((index, place), found) == found
