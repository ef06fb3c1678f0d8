"""Folders in 16 bits, in one file and in shards, tied and not, with dtype="auto": computed in float32 on a CPU, and
equal to transformers in float32 on the same weights."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors import safe_open
from transformers import Gemma3ForCausalLM

from lamella import LLM, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

PROMPT = [2, *(6 + 7 * index % 300 for index in range(40))]
NUM_TOKENS = 4


CASES = [("bfloat16", "30KB", True), ("bfloat16", "1GB", False), ("float16", "30KB", False), ("float16", "1GB", True)]
OTHERS = [("bfloat16", "1GB", True), ("bfloat16", "30KB", False), ("float16", "1GB", False), ("float16", "30KB", True)]


@pytest.mark.parametrize(
    ("dtype", "max_shard_size", "is_tied"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_scores_are_those_of_the_stored_numbers(dtype, max_shard_size, is_tied, tmp_path, caplog):
    settings = {"num_hidden_layers": 3, "tie_word_embeddings": is_tied}
    save_tiny_gemma(tmp_path / "m", dtype=dtype, max_shard_size=max_shard_size, **settings)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert (len(files) > 2) == (max_shard_size == "30KB")
    stored = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored |= {(name == "lm_head.weight", file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    assert stored == {(False, getattr(torch, dtype)), *([] if is_tied else [(True, getattr(torch, dtype))])}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with (
        caplog.at_level(logging.INFO),
        LLM(str(tmp_path / "m"), dtype="auto", max_model_len=128, kv_cache_memory_bytes=2**23) as llm,
    ):
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    said = [record.getMessage() for record in caplog.records if "computed in float32" in record.getMessage()]
    assert said == [f"{tmp_path / 'm'}: stored in {dtype}, computed in float32"]
    tokens = list(output.outputs[0].token_ids)
    model = Gemma3ForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    scores = logits.log_softmax(-1)
    assert tokens == scores.argmax(-1).tolist()
    ours = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    assert ours == pytest.approx(scores.max(-1).values.tolist(), abs=1e-4)
