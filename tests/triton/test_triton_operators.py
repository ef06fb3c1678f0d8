"""The triton operators in whole models: against transformers in float64, and beside eager torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.errors import ConfigError, InvariantError
from lamella.model_executor.layers.choice import choose_operators
from lamella.model_executor.layers.contract import Operators
from lamella.model_executor.layers.description import Projection
from lamella.model_executor.layers.torch_operators import TorchOperators
from lamella.model_executor.layers.triton.operators import TritonOperators
from lamella.model_executor.weights.parameters import Part
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.triton_cases import DEVICE

TWO_LAYERS = {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 5}
NUM_PROMPT, NUM_NEW = 13, 3


class Run:
    """A prompt in chunks and a few greedy tokens, one request at a time. tokens: [n]; hidden: float64 [n, width], what
    each token came from; calls: how often each of the operators ran."""

    def __init__(self, folder: Path, prompt: list[int], dtype: str, operators: Operators | None = None) -> None:
        arguments: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**20, "page_size": 4}
        arguments |= {"max_num_batched_tokens": 6, "max_num_seqs": 2, "device": DEVICE.type}
        self.calls: Counter[str] = Counter()
        rows = []
        with LLM(str(folder), attention_backend="triton", dtype=dtype, check_invariants=True, **arguments) as llm:
            model = llm.engine.inspect().runner.model
            self.name = model.operators.name
            model.operators = watched(operators or model.operators, self.calls)
            logits = model.logits

            def recorded(hidden: torch.Tensor) -> Any:
                rows.append(hidden.cpu().double())
                return logits(hidden)

            model.logits = recorded
            params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        self.tokens = list(output.outputs[0].token_ids)
        self.hidden = torch.cat(rows)


OPERATIONS = ("embed", "norm", "run", "attention", "multiply", "activate", "add", "head")


def watched(operators: Operators, calls: Counter[str]) -> Operators:
    """`operators`, whose operations are counted whoever calls them; attention of some tokens' queries by itself."""

    def counted(name: str) -> Any:
        call = getattr(operators, name)

        def count(*arguments: Any) -> Any:
            is_of_rows = name == "attention" and arguments[-1] is not None
            calls["attention of rows" if is_of_rows else name] += 1
            return call(*arguments)

        return count

    for name in OPERATIONS:
        setattr(operators, name, counted(name))
    return operators


def errors(run: Run, model: Any, prompt: list[int]) -> torch.Tensor:
    """float64 [n, width]: how far `run.hidden` is from what transformers has after the last norm for those tokens."""
    tokens = torch.tensor([[*prompt, *run.tokens]])
    with torch.inference_mode():
        states = model.double()(tokens, use_cache=False, output_hidden_states=True).hidden_states
    expected = states[-1][0, len(prompt) - 1 : -1]
    assert run.hidden.shape == expected.shape
    assert 2 < expected.abs().max() < 5
    return run.hidden - expected


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float16", 1e-2), ("bfloat16", 8e-2)])
def test_hidden_states_are_those_of_transformers_in_float64(dtype: str, bound: float, tmp_path: Path) -> None:
    model = save_tiny_gemma(tmp_path, dtype=dtype, **TWO_LAYERS)
    prompt = np.random.default_rng(8).integers(6, 320, NUM_PROMPT).tolist()
    fused = Run(tmp_path, prompt, dtype)
    assert fused.name == "triton"
    assert {*OPERATIONS, "attention of rows"} <= set(fused.calls)
    assert errors(fused, model, prompt).abs().max() < bound
    if dtype == "float32":
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *fused.tokens]]), use_cache=False).logits[0]
        assert fused.tokens == logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist()
    if dtype == "float16":  # not in bfloat16, which the interpreter truncates where torch rounds
        eager = Run(tmp_path, prompt, dtype, TorchOperators())
        assert errors(fused, model, prompt).norm() < 1.2 * errors(eager, model, prompt).norm()


def test_capped_logits_of_an_untied_head() -> None:
    operators = TritonOperators()
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(70, 32, generator=generator), torch.randn(5, 32, generator=generator)
    projection = Projection("lm_head", [Part("lm_head", 70)], 32)
    projection.tensors["weight"] = weight.to(DEVICE)
    plain = hidden.double() @ weight.double().t()
    capped = operators.head(projection, hidden.to(DEVICE), 3.0)
    assert capped.dtype == torch.float32
    torch.testing.assert_close(capped.cpu().double(), 3 * (plain / 3).tanh(), rtol=1e-5, atol=1e-5)
    uncapped = operators.head(projection, hidden.to(DEVICE), None)
    torch.testing.assert_close(uncapped.cpu().double(), plain, rtol=1e-5, atol=1e-5)


def test_the_triton_backend_takes_triton_operators_and_they_nothing_else(tmp_path: Path) -> None:
    unused: Any = None
    assert isinstance(choose_operators(None, "triton", unused, unused), TritonOperators)
    assert isinstance(choose_operators("none", "torch", unused, unused), TorchOperators)
    with pytest.raises(ConfigError, match=r"quantization='int8' needs the native CPU path.*runs on 'triton' here"):
        choose_operators("int8", "triton", unused, unused)
    save_tiny_gemma(tmp_path, **TWO_LAYERS)
    arguments: dict[str, Any] = {
        "device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 2**20, "check_invariants": True
    }  # fmt: skip
    with LLM(str(tmp_path), attention_backend="torch", **arguments) as llm:
        llm.engine.inspect().runner.model.operators = TritonOperators()
        with pytest.raises(InvariantError, match=r"the pages of backend 'torch'.*those that do go with 'triton'"):
            llm.generate([[7, 8, 9]], SamplingParams(max_tokens=1), use_tqdm=False)
