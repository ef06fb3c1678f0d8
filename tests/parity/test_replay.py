"""Windowed replay and copy on write on real arithmetic: what is resumed equals what is computed from nothing.

First Gemma 3 270M's real weights with windows of 16 tokens, so that 15 sliding layers' reach fits into a short prompt;
its uncached self is the oracle, for the tokens, the likeliest two's log-probabilities, and every layer's K and V. Then
a made-up stack in the shape of gpt-oss, against dense float64 attention.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.attention.backend import AttentionParams
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.engine import model_setup
from lamella.kv_cache import invariants
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.runner import ModelRunner
from tests.helpers.attention_cases import nan_arena
from tests.helpers.simulation import Simulation
from tests.parity.harness import load_cases

# Gemma 3 270M, windows of 16

WINDOW_TOKENS, PAGE_TOKENS = 16, 16
FULL_LAYERS = (5, 11, 17)
SLIDING_LAYERS = tuple(layer for layer in range(18) if layer not in FULL_LAYERS)
NUM_ANSWER_TOKENS = 5
KV_TOLERANCE, LOGPROB_TOLERANCE = 1e-4, 1e-4

_LONG = [list(case.prompt_token_ids) for case in load_cases() if len(case.prompt_token_ids) > 1500]
FIRST = _LONG[0][:580]
PARTED = FIRST[:530] + _LONG[1][700:720]  # in block 33; 550 tokens
PARTED_LATER = PARTED[:540] + _LONG[2][900:912]  # in block 33 of PARTED, which is its own
PARTED_AT_THE_END = FIRST[:570] + _LONG[1][800:806]  # in block 35 of FIRST


class Answer(NamedTuple):
    """kv: layer -> (first position, K and V [positions, heads, 2 * dim]) of what it held when the prompt was done."""

    num_cached_tokens: int
    token_ids: list[int]
    logprobs: list[list[float]]  # of the two likeliest tokens, per position
    kv: dict[int, tuple[int, torch.Tensor]]


@pytest.fixture
def small_windows(monkeypatch):
    load_config = model_setup.load_config

    def load(source):
        config = load_config(source)
        layers = [
            dataclasses.replace(layer, window_tokens=WINDOW_TOKENS) if layer.window_tokens else layer
            for layer in config.layers
        ]
        assert [layer for layer, each in enumerate(layers) if each.window_tokens] == list(SLIDING_LAYERS)
        return dataclasses.replace(config, layers=tuple(layers))

    monkeypatch.setattr(model_setup, "load_config", load)


def gemma(**arguments):
    return LLM("demo:gemma-3-270m", max_model_len=1024, kv_cache_memory_bytes=2**28, max_num_seqs=4, **arguments)


def ask(llm, prompt: list[int]) -> Answer:
    """Greedily, and alone."""
    engine, loaded = llm.engine, llm.engine._loaded
    engine.add_request(
        "r", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=NUM_ANSWER_TOKENS, logprobs=2, ignore_eos=True)
    )
    outputs = []
    while not outputs:  # the step that ends the prompt gives the first token
        outputs = engine.step()
    (row,) = loaded.scheduler.running
    kv = {layer: held_kv(loaded, row, layer, len(prompt)) for layer in range(18)}
    while engine.has_unfinished_requests():
        outputs = engine.step()
    engine.check_invariants()
    answer = outputs[0].outputs[0]
    logprobs = [sorted((one.logprob for one in entry.values()), reverse=True)[:2] for entry in answer.logprobs]
    return Answer(outputs[0].num_cached_tokens, list(answer.token_ids), logprobs, kv)


def held_kv(loaded, row: int, layer: int, num_tokens: int) -> tuple[int, torch.Tensor]:
    manager, cache = loaded.manager, loaded.runner.caches[layer]
    group = loaded.runner.group_of_layer[layer]
    first = int(manager.first_kept[group, row])
    pages = torch.from_numpy(manager.tables[group, row, first : -(-num_tokens // PAGE_TOKENS)])
    assert (pages >= 0).all()
    both = torch.cat([cache.keys[pages], cache.values[pages]], dim=-1).flatten(0, 1)
    return first * PAGE_TOKENS, both[: num_tokens - first * PAGE_TOKENS].clone()


def kv_error(actual: Answer, expected: Answer, layer: int, first: int) -> tuple[int, float]:
    """(how many positions from `first` on both hold, the largest difference)."""
    (start, ours), (oracle_start, theirs) = actual.kv[layer], expected.kv[layer]
    assert oracle_start == 0
    first = max(first, start)
    difference = ours[first - start :] - theirs[first:]
    return len(difference), float(difference.abs().max())


def assert_same(actual: Answer, expected: Answer) -> None:
    assert actual.token_ids == expected.token_ids
    assert len(expected.logprobs) == NUM_ANSWER_TOKENS
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


def strip(llm) -> None:
    """Let go every window that nobody uses; full-attention KV stays."""
    tree = llm.engine._loaded.manager.tree
    while tree.strip_one():
        pass
    assert not tree.page[tree.windowed_groups].any()


def test_gemma_answers_from_replayed_windows_as_from_nothing(small_windows):
    with gemma(windowed_replay=False, enable_prefix_caching=False) as llm:
        parted, later, at_the_end = (ask(llm, prompt) for prompt in (PARTED, PARTED_LATER, PARTED_AT_THE_END))
        assert llm.engine.stats().num_cached_tokens == 0

    with gemma() as llm:
        manager = llm.engine._loaded.manager
        manager.tree.keep_spare = False
        ask(llm, FIRST)

        # Copy on write in the block where FIRST ended: its window is still there.
        answer = ask(llm, PARTED_AT_THE_END)
        assert answer.num_cached_tokens == 570
        assert_same(answer, at_the_end)

        # The window before 528 is long gone. 15 layers' windows of 15 tokens before, and a block less one token more:
        # 528 - 225 - 15 = 288, a block boundary.
        answer = ask(llm, PARTED)
        assert answer.num_cached_tokens == 288
        assert_same(answer, parted)
        for layer in FULL_LAYERS:
            num_compared, error = kv_error(answer, parted, layer, 0)
            assert num_compared == 550
            assert error < KV_TOLERANCE, f"layer {layer}"
        for index, layer in enumerate(SLIDING_LAYERS):
            exact_from = 288 + 15 * index  # each layer before took one window's worth
            num_compared, error = kv_error(answer, parted, layer, exact_from)
            assert num_compared == 550 - exact_from
            assert error < KV_TOLERANCE, f"layer {layer}"
            if index:
                assert kv_error(answer, parted, layer, 288)[1] > 100 * KV_TOLERANCE, "nothing was replayed"

        # Inside the block after the replayed ones: a copy of it, and a window that the replay committed.
        answer = ask(llm, PARTED_LATER)
        assert answer.num_cached_tokens == 540
        assert_same(answer, later)
        for layer in SLIDING_LAYERS:
            num_compared, error = kv_error(answer, later, layer, 0)
            assert num_compared == 552 - 512
            assert error < KV_TOLERANCE, f"layer {layer}"

        # Chunks as small as what other requests may leave of a step: they end inside the replayed range. PARTED's 34
        # whole blocks are all known now: 544 - 240 = 304.
        strip(llm)
        llm.engine._loaded.scheduler.chunk_tokens = 37
        answer = ask(llm, PARTED)
        assert answer.num_cached_tokens == 304
        assert_same(answer, parted)
        for layer in SLIDING_LAYERS:
            num_compared, error = kv_error(answer, parted, layer, 544 - 15)
            assert num_compared > 0
            assert error < KV_TOLERANCE, f"layer {layer}"
