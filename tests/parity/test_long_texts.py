"""Texts that grow beyond the length at which their rotary embedding changes: Phi 3, tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.random_models import Draw, random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_tokenizer

ORIGINAL, NUM_NEW = 40, 24
LENGTHS = (5, 30, 39, 40, 41, 70)  # short to the end, growing beyond in the middle, at once, and long from the start


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("window", [None, 12])
def test_tokens_are_those_of_transformers(window: int | None, backend: str, tmp_path: Path) -> None:
    import transformers

    draw = Draw("phi3", 3)
    rope = draw.rope("longrope")
    config = transformers.Phi3Config(
        **draw.sizes(3), sliding_window=window, original_max_position_embeddings=ORIGINAL, rope_parameters=rope
    )
    model = random_model(config)
    model.save_pretrained(tmp_path)
    save_tiny_tokenizer(tmp_path)
    generator = np.random.default_rng(1)
    longest = generator.integers(6, VOCAB_SIZE, size=max(LENGTHS)).tolist()
    prompts = [longest[:length] for length in LENGTHS]  # they share beginnings, which short and long texts must not
    expected = [_greedy(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=VOCAB_SIZE)
    settings = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "page_size": 16}
    with LLM(
        str(tmp_path), attention_backend=backend, check_invariants=True, max_num_batched_tokens=24, **settings
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, (tokens, scores), output in zip(prompts, expected, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == tokens, len(prompt)
                for position, entry in enumerate(output.outputs[0].logprobs):
                    ours = torch.tensor([entry[token].logprob for token in range(VOCAB_SIZE)])
                    assert (ours - scores[position]).abs().max() < 1e-4, (len(prompt), position)


@torch.inference_mode()
def _greedy(model: object, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Whole texts, without a cache: one embedding for all of a text's tokens."""
    tokens, scores = list(prompt), []
    for _ in range(NUM_NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]  # type: ignore[operator]
        scores.append(logits.float().log_softmax(-1))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], torch.stack(scores)
