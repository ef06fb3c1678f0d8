"""Adapters beside the Triton operators: log-probabilities equal those of transformers' model with each merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lamella import LLM, LoRARequest, SamplingParams
from tests.helpers.lora_files import merged, save_lora
from tests.helpers.random_models import save_random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE
from tests.helpers.triton_cases import DEVICE

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALE = 2.0


def test_two_adapters_and_none_in_one_batch(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_random_model(tmp_path / "model", "llama", 0, window=8)
    weights = [
        save_lora(tmp_path / "all", model, seed=1, modules=ALL, spread=0.2, r=4, lora_alpha=4 * SCALE),
        save_lora(
            tmp_path / "two", model, seed=2, modules=("k_proj", "up_proj"), spread=0.2, r=3, lora_alpha=3 * SCALE
        ),
        {},
    ]
    requests = [LoRARequest("all", 1, tmp_path / "all"), LoRARequest("two", 2, tmp_path / "two"), None]
    draw = np.random.default_rng(8)
    prompts = [draw.integers(6, VOCAB_SIZE, length).tolist() for length in (5, 4, 3)]
    with LLM(
        str(tmp_path / "model"), attention_backend="triton", enable_lora=True, device=DEVICE.type, dtype="float32",
        max_model_len=64, kv_cache_memory_bytes=2**21, page_size=4, max_num_batched_tokens=24, max_num_seqs=3,
        check_invariants=True,
    ) as llm:  # fmt: skip
        assert llm.engine.inspect().runner.model.operators.name == "triton"
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=VOCAB_SIZE)
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    for output, its_weights in zip(outputs, weights, strict=True):
        chosen = output.outputs[0]
        tokens = torch.tensor([output.prompt_token_ids + chosen.token_ids])
        found = torch.tensor([[step[token].logprob for token in range(VOCAB_SIZE)] for step in chosen.logprobs])
        with torch.inference_mode():
            expected, plain = (
                one(tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
                for one in (merged(model, its_weights, SCALE), model)
            )
        assert chosen.token_ids == expected.argmax(-1).tolist()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        if its_weights:
            assert (found - plain).abs().max() > 0.05, "an adapter that does nothing is told apart"
