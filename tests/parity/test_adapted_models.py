"""Random models of every architecture with adapters of all linear layers that can have one, beside requests of another
adapter and of none: log-probabilities equal those of transformers' model with the adapter merged into its weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, LoRARequest, SamplingParams
from tests.helpers.lora_files import merged, save_lora
from tests.helpers.random_gguf import CONVERSIONS, save_random_gguf
from tests.helpers.random_gguf_configs import config_of
from tests.helpers.random_models import ARCHITECTURES, random_model, save_random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE

# Rotary embedding of neighbours, fused layers, and layers that run in parts: one of each kind by default.
BY_DEFAULT = ("llama4", "phi3", "cohere2", "gemma4", "gpt_oss")
GGUF_BY_DEFAULT = ("llama", "cohere2")
ARGUMENTS = {"max_model_len": 160, "kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 48, "max_num_seqs": 4}
SCALE = 2.0
# What no adapter can be given to, of modules that transformers builds of Linear.
_OTHERS = re.compile(r"lm_head|experts|shared|router|\.mlp\.gate$|feed_forward\.gate$|per_layer_model|moe\.gate")


def is_adaptable(name: str) -> bool:
    return _OTHERS.search(name) is None


def check(model_path: Path, model: Any, folder: Path, **arguments: Any) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = [name for name in linear if is_adaptable(name)]
    weights = [
        save_lora(
            folder / name, model, seed=seed, spread=0.15, modules=targets.__contains__, target_modules=targets,
            r=4, lora_alpha=4 * SCALE,
        )
        for seed, name in enumerate(("first", "second"))
    ]  # fmt: skip
    requests = [LoRARequest("first", 1, folder / "first"), LoRARequest("second", 2, folder / "second"), None]
    models = [merged(model, weights[0], SCALE), merged(model, weights[1], SCALE), model]
    generator = np.random.default_rng(3)
    prompts = [generator.integers(6, VOCAB_SIZE, size=length).tolist() for length in (70, 33, 20)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=VOCAB_SIZE)
    with LLM(str(model_path), enable_lora=True, **{**ARGUMENTS, **arguments}) as llm:
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
    for output, expected in zip(outputs, models, strict=True):
        tokens = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
        with torch.inference_mode():
            logits = expected(tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        ours = [[each[token].logprob for token in range(VOCAB_SIZE)] for each in output.outputs[0].logprobs]
        torch.testing.assert_close(torch.tensor(ours), logits.log_softmax(dim=-1), rtol=0, atol=5e-4)
    assert outputs[0].lora_request == requests[0]


def _marked(names: Any, default: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _marked(ARCHITECTURES, BY_DEFAULT))
def test_adapters_of_every_architecture(tmp_path, name):
    (tmp_path / "model").mkdir()
    model = save_random_model(tmp_path / "model", name, 0)
    check(tmp_path / "model", model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_on_the_torch_path(tmp_path, name):
    (tmp_path / "model").mkdir()
    model = save_random_model(tmp_path / "model", name, 1)
    check(tmp_path / "model", model, tmp_path, attention_backend="torch")


@pytest.mark.parametrize("name", _marked(CONVERSIONS, GGUF_BY_DEFAULT))
def test_adapters_of_a_model_in_a_gguf_file(tmp_path, name):
    """The file's rows of Q and K may lie in another order than those of the modules that the adapter is for."""
    model = random_model(config_of(name, 0))
    save_random_gguf(tmp_path / "model.gguf", name, model)
    check(tmp_path / "model.gguf", model, tmp_path)
