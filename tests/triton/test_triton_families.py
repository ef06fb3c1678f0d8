"""The triton operators on every architecture: tokens and log-probabilities equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.random_models import ARCHITECTURES, save_random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE
from tests.helpers.triton_cases import DEVICE

NUM_PROMPT, NUM_NEW = 13, 2
# In the interpreter a layer takes a second, so only small models of different parts run by default.
QUICK = ("llama", "mistral", "ministral3", "olmo2", "starcoder2")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, name, 0, window=8)
    prompt = np.random.default_rng(8).integers(6, VOCAB_SIZE, NUM_PROMPT).tolist()
    arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "page_size": 4}
    arguments |= {"max_num_batched_tokens": 7, "max_num_seqs": 2, "device": DEVICE.type, "dtype": "float32"}
    with LLM(str(tmp_path), attention_backend="triton", check_invariants=True, **arguments) as llm:
        assert llm.engine.inspect().runner.model.operators.name == "triton"
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=VOCAB_SIZE)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    chosen = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + chosen]), use_cache=False).logits[0, NUM_PROMPT - 1 : -1].float()
    expected = logits.log_softmax(-1)
    assert chosen == expected.argmax(-1).tolist()
    for entry, scores in zip(output.outputs[0].logprobs, expected, strict=True):
        ours = torch.tensor([entry[token].logprob for token in range(VOCAB_SIZE)])
        assert (ours - scores).abs().max() < 1e-4
