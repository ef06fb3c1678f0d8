"""Small random models of every architecture: tokens and log-probabilities equal transformers'.

Prompts end before, at and after a window's edge and several windows deep; they are computed at once, in chunks beside
decodes, from the prefix cache, and after preemption. A config is drawn for each seed (tests/helpers/random_models.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec
from lamella.model_executor.models.config import kv_sharing, layer_specs
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_json import read_json_object
from tests.helpers.random_models import ARCHITECTURES, draw_config, save_random_model, window_tokens
from tests.helpers.tiny_gemma import VOCAB_SIZE

NUM_SEEDS, NUM_SLOW_SEEDS, NUM_NEW = 3, 30, 6
MOST_DIFFERENCE = 1e-4
NUM_GROWING, NUM_GROWN = 6, 40
LENGTH = 160


class Case(NamedTuple):
    folder: Path
    model: Any  # transformers'
    prompts: list[list[int]]  # of W - 1, W, W + 1 and 3 W + 5 tokens
    expected: list[tuple[list[int], torch.Tensor]]  # greedy tokens, and the log-probabilities [new tokens, vocab]
    growing: list[int]  # a prompt of W + 1 tokens that is followed for NUM_GROWN
    grown: tuple[list[int], torch.Tensor]


def make_case(folder: Path, name: str, seed: int) -> Case:
    model = save_random_model(folder, name, seed)
    window = window_tokens(model.config.get_text_config())
    generator = np.random.default_rng(seed)
    lengths = (window - 1, window, window + 1, 3 * window + 5)
    prompts = [generator.integers(6, VOCAB_SIZE, size=length).tolist() for length in lengths]
    growing = generator.integers(6, VOCAB_SIZE, size=window + 1).tolist()
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    return Case(folder, model, prompts, expected, growing, greedy(model, growing, NUM_GROWN))


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """One full forward pass for each token: no cache that could be wrong."""
    tokens, scores = list(prompt), []
    for _ in range(num_new):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        scores.append(logits.log_softmax(-1))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], torch.stack(scores)


def check(expected: list[tuple[list[int], torch.Tensor]], outputs: list[Any]) -> None:
    """Where the two largest are closer than rounding, either may be chosen, and what follows differs."""
    for index, ((tokens, scores), output) in enumerate(zip(expected, outputs, strict=True)):
        chosen = list(output.outputs[0].token_ids)
        for position, entry in enumerate(output.outputs[0].logprobs):
            ours = torch.tensor([entry[token].logprob for token in range(VOCAB_SIZE)])
            difference = (ours - scores[position]).abs().max()
            assert difference < MOST_DIFFERENCE, f"prompt {index} at {position}: {difference:.1e}"
            if chosen[position] != tokens[position]:
                best, second = scores[position].topk(2).values
                assert best - second < 2 * MOST_DIFFERENCE, f"prompt {index} at {position}"
                break


def engine(case: Case, backend: str, **arguments: Any) -> LLM:
    settings = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "page_size": 16}
    llm = LLM(str(case.folder), attention_backend=backend, check_invariants=True, **{**settings, **arguments})
    assert llm.engine.attention_backend == backend
    assert llm.engine.inspect().runner.model.operators.name == backend
    return llm


def check_all(case: Case, backend: str) -> None:
    """Cold and cached, whole and in chunks beside decodes; and with memory that ends while texts grow."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=VOCAB_SIZE)
    with engine(case, backend, max_num_batched_tokens=24) as llm:
        check(case.expected, llm.generate(case.prompts, params, use_tqdm=False))
        outputs = llm.generate(case.prompts, params, use_tqdm=False)
        check(case.expected, outputs)
        assert sum(output.num_cached_tokens for output in outputs) == sum(len(prompt) - 1 for prompt in case.prompts)
    params = SamplingParams(temperature=0, max_tokens=NUM_GROWN, ignore_eos=True, logprobs=VOCAB_SIZE)
    with engine(case, backend, **small_memory(case)) as llm:
        outputs = llm.generate([case.growing] * NUM_GROWING, params, use_tqdm=False)
        check([case.grown] * NUM_GROWING, outputs)
        has_full_layers = any(isinstance(spec, FullAttentionSpec) for spec in specs(case))
        # A model of windows alone hardly grows.
        assert llm.engine.stats().num_preemptions > 0 or not has_full_layers


def specs(case: Case) -> list[KVCacheSpec]:
    """Of the layers that have K and V of their own."""
    config = parse_config(read_json_object(case.folder / "config.json"))
    shared = kv_sharing(config)
    return [spec for layer, spec in enumerate(layer_specs(config, itemsize_bytes=4)) if layer not in shared]


def small_memory(case: Case) -> dict[str, Any]:
    """Room for all prompts, but not for all texts."""
    max_model_len = len(case.growing) + NUM_GROWN
    num_tokens = NUM_GROWING * len(case.growing) + 2 * NUM_GROWN
    return {
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": sum(spec.token_bytes for spec in specs(case)) * num_tokens,
        "enable_prefix_caching": False,
        "max_num_seqs": NUM_GROWING,
        "page_size": 16,
        "scheduling_policy": "fcfs",  # lets all begin, while "prefix" would let some wait until others have grown
    }


# The same operators run all of them by torch's products: by default for every third.
CASES = [
    *itertools.product(ARCHITECTURES, ["native"], range(NUM_SEEDS)),
    *((name, "torch", 0) for name in tuple(ARCHITECTURES)[::3]),
]


@pytest.mark.parametrize(("name", "backend", "seed"), CASES)
def test_tokens_and_scores_are_those_of_transformers(name: str, backend: str, seed: int, tmp_path: Path) -> None:
    check_all(make_case(tmp_path, name, seed), backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS, NUM_SLOW_SEEDS))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_more_configs(name: str, seed: int, tmp_path: Path) -> None:
    case = make_case(tmp_path, name, seed)
    for backend in ("native", "torch"):
        check_all(case, backend)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_draws_differ(name: str) -> None:
    """Or seeds would mean nothing."""

    def drawn() -> Iterator[str]:
        for seed in range(NUM_SEEDS):
            yield draw_config(name, seed).to_json_string()

    assert len(set(drawn())) == NUM_SEEDS
