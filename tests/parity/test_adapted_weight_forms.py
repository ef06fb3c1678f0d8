"""Adapters of models whose own weights are stored as integers: log-probabilities equal those of transformers' model
that has the numbers which the form stands for, and the adapter's float product on top; the batch does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lamella import LLM, LoRARequest, SamplingParams
from lamella.native.library import load_library
from tests.helpers.lora_files import merged, save_lora
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

pytestmark = pytest.mark.skipif(load_library() is None, reason="the native kernels are not there")
ARGUMENTS = {"max_model_len": 96, "kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 4, "enable_prefix_caching": False,
             "max_num_batched_tokens": 48, "check_invariants": True, "enable_lora": True}  # fmt: skip
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[2] + [(7 * row + 11 * place) % 300 + 8 for place in range(20 + 9 * row)] for row in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=VOCAB_SIZE)
SCALE = 2.0


def int8_numbers(weight: np.ndarray) -> np.ndarray:
    """Each row on 255 levels between minus and plus its largest magnitude."""
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(weight / scales).astype(np.float32) * scales


def block_numbers(storage: str) -> Any:
    """What a GGUF file of this type holds, by the gguf package."""
    kind = gguf.GGMLQuantizationType[storage]
    return lambda weight: gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


def with_numbers(model: Any, numbers: Any) -> Any:
    """A copy of the model whose matrices are what `numbers` makes of them."""
    changed = merged(model, {}, 1.0)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(numbers(parameter.numpy()).reshape(parameter.shape)))
    return changed


def expected_logprobs(model: Any, output: Any) -> torch.Tensor:
    tokens = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def logprobs_of(output: Any) -> torch.Tensor:
    steps = output.outputs[0].logprobs
    return torch.tensor([[step[token].logprob for token in range(VOCAB_SIZE)] for step in steps], dtype=torch.float64)


class Case:
    """A model, and two adapters of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        self.model = save_tiny_gemma(folder / "model", seed=2, sliding_window_pattern=6)  # as GGUF files have it
        arguments: dict[str, Any] = {"spread": 0.15, "r": 4, "lora_alpha": 4 * SCALE}
        self.weights = [
            save_lora(folder / "all", self.model, seed=1, modules=ALL, **arguments),
            save_lora(folder / "two", self.model, seed=2, modules=("q_proj", "down_proj"), **arguments),
            {},
        ]
        self.requests = [LoRARequest("all", 1, folder / "all"), LoRARequest("two", 2, folder / "two"), None]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("forms"))


# Beside the numbers that a form stands for, w8a8 rounds a layer's inputs, to 1/32767 of the largest of each 128.
FORMS = {
    "int8": ("int8", None, int8_numbers, 2e-5),
    "w8a8": ("w8a8", None, int8_numbers, 1e-3),
    "Q8_0": ("gguf", "Q8_0", block_numbers("Q8_0"), 2e-5),
    "Q4_0": ("gguf", "Q4_0", block_numbers("Q4_0"), 2e-5),
    "Q5_1": ("gguf", "Q5_1", block_numbers("Q5_1"), 2e-5),
    "BF16": ("gguf", "BF16", block_numbers("BF16"), 2e-5),
}
BY_DEFAULT = ("int8", "w8a8", "Q4_0")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in BY_DEFAULT else pytest.mark.slow) for form in FORMS]
)
def test_adapters_on_weights_of_every_form(case: Case, form: str, tmp_path: Path) -> None:
    quantization, storage, numbers, tolerance = FORMS[form]
    path = case.folder / "model"
    if storage is not None:
        path = tmp_path / "model.gguf"
        save_tiny_gguf(path, case.model, quantise=storage)
    with LLM(str(path), quantization=quantization, **ARGUMENTS) as llm:
        assert llm.engine.attention_backend == "native"
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=case.requests, use_tqdm=False)
        alone = [
            llm.generate([prompt], PARAMS, lora_request=request, use_tqdm=False)[0]
            for prompt, request in zip(PROMPTS, case.requests, strict=True)
        ]
    assert [output.outputs[0].logprobs for output in outputs] == [output.outputs[0].logprobs for output in alone]
    base = with_numbers(case.model, numbers)
    for output, weights in zip(outputs, case.weights, strict=True):
        found = logprobs_of(output)
        torch.testing.assert_close(
            found, expected_logprobs(merged(base, weights, SCALE), output), rtol=0, atol=tolerance
        )
        # Weights that were not rounded, and an adapter that did nothing, are told apart.
        assert (found - expected_logprobs(merged(case.model, weights, SCALE), output)).abs().max() > 4 * tolerance
        if weights:
            assert (found - expected_logprobs(base, output)).abs().max() > 0.05
