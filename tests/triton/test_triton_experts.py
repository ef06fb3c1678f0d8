"""The triton operators on families with experts: tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella import LLM, SamplingParams
from tests.helpers.tiny_decoders import greedy_tokens
from tests.helpers.tiny_experts import save_tiny_experts
from tests.helpers.triton_cases import DEVICE

NUM_PROMPT, NUM_NEW = 13, 3


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4", "qwen2 with experts"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    window = {"gpt-oss": "sliding_window", "llama 4": "attention_chunk_size"}.get(name, "sliding_window")
    model = save_tiny_experts(tmp_path, name, num_hidden_layers=2, **{window: 5})
    prompt = np.random.default_rng(8).integers(6, 320, NUM_PROMPT).tolist()
    arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**20, "page_size": 4}
    arguments |= {"max_num_batched_tokens": 6, "max_num_seqs": 2, "device": DEVICE.type, "dtype": "float32"}
    with LLM(str(tmp_path), attention_backend="triton", check_invariants=True, **arguments) as llm:
        assert llm.engine.inspect().runner.model.operators.name == "triton"
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == greedy_tokens(model, prompt, NUM_NEW)
