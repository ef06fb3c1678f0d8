"""Activations that few models have: as transformers computes them, and natively the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.tiny_gemma import VOCAB_SIZE
from tests.helpers.transformers_models import logits_of, save_random_model

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=VOCAB_SIZE)
LENGTHS = (1, 7, 30)


def rows(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """float32 [len(prompts), vocab_size], log-probabilities after each prompt."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in found])


OTHERS = [
    ("llama", "hidden_act", "quick_gelu"),
    ("starcoder2", "hidden_act", "gelu"),
    ("qwen2_moe", "hidden_act", "relu2"),
    ("step3p7", "hidden_act", "gelu_fast"),
]


@pytest.mark.parametrize(
    ("name", "key", "activation"),
    [
        ("mixtral", "hidden_act", "gelu_python"),
        ("gemma4_text", "hidden_activation", "relu"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_activations_are_those_of_transformers(name: str, key: str, activation: str, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, name, **{key: activation})
    generator = np.random.default_rng(0)
    prompts = [generator.integers(6, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]
    expected = torch.stack([logits_of(model, prompt)[-1].log_softmax(-1) for prompt in prompts])
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "enable_prefix_caching": False}
    for backend in ("native", "torch"):
        with LLM(str(tmp_path), model_impl="native", attention_backend=backend, **settings) as llm:
            together = rows(llm, prompts)
            assert (together - expected).abs().max() < 1e-4
            if backend == "native":
                assert torch.equal(torch.cat([rows(llm, [prompt]) for prompt in prompts]), together)
