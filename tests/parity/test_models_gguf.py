"""Random models in GGUF files as llama.cpp's converter writes them: scores equal transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.random_gguf import CONVERSIONS, save_random_gguf
from tests.helpers.random_gguf_configs import config_of
from tests.helpers.random_models import random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE

NUM_NEW = 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_scores_are_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model = random_model(config_of(name, seed), seed=seed)
    path = tmp_path / "model.gguf"
    save_random_gguf(path, name, model)
    prompt = np.random.default_rng(seed).integers(6, VOCAB_SIZE, size=70).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=VOCAB_SIZE)
    settings = {"max_model_len": 96, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 2, "page_size": 16}
    with LLM(str(path), max_num_batched_tokens=32, **settings) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    chosen = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + chosen]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    for entry, scores in zip(output.outputs[0].logprobs, logits.log_softmax(-1), strict=True):
        ours = torch.tensor([entry[token].logprob for token in range(VOCAB_SIZE)])
        assert (ours - scores).abs().max() < 1e-4
