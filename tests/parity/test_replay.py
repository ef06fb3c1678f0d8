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
from lamella.attention.contract import AttentionParams
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.engine import model_opening
from lamella.kv_cache import invariants
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.retention import RetentionPolicy
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
KV_TOLERANCE, LOGPROB_TOLERANCE = 2e-5, 1e-4  # of the largest element; absolute

_LONG = [list(case.prompt_token_ids) for case in load_cases() if len(case.prompt_token_ids) > 1500]
FIRST = _LONG[0][:580]
PARTED = FIRST[:530] + _LONG[1][700:720]  # in block 33; 550 tokens
PARTED_LATER = PARTED[:540] + _LONG[2][910:922]  # in block 33 of PARTED, which is its own
PARTED_AT_THE_END = FIRST[:570] + _LONG[1][800:806]  # in block 35 of FIRST
assert all(FIRST[at] != prompt[at] for at, prompt in ((530, PARTED), (570, PARTED_AT_THE_END)))
assert PARTED[540] != PARTED_LATER[540]


class Answer(NamedTuple):
    """kv: layer -> (first position, K and V [positions, heads, 2 * dim]) of what it held when the prompt was done."""

    num_cached_tokens: int
    token_ids: list[int]
    logprobs: list[list[float]]  # of the two likeliest tokens, per position
    kv: dict[int, tuple[int, torch.Tensor]]


@pytest.fixture
def small_windows(monkeypatch):
    load_config = model_opening.load_config

    def load(source):
        config = load_config(source)
        layers = [
            dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window_tokens=WINDOW_TOKENS))
            if layer.attention.window_tokens
            else layer
            for layer in config.layers
        ]
        assert [layer for layer, each in enumerate(layers) if each.attention.window_tokens] == list(SLIDING_LAYERS)
        return dataclasses.replace(config, layers=tuple(layers))

    monkeypatch.setattr(model_opening, "load_config", load)


def gemma(**arguments):
    return LLM("demo:gemma-3-270m", max_model_len=1024, kv_cache_memory_bytes=2**28, max_num_seqs=4, **arguments)


def ask(llm, prompt: list[int]) -> Answer:
    """Greedily, and alone."""
    engine, loaded = llm.engine, llm.engine.inspect()
    engine.add_request(
        "r",
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=NUM_ANSWER_TOKENS, logprobs=2, ignore_eos=True),
    )
    scheduler, kv = loaded.scheduler, {}
    update = type(scheduler).update

    def watched(result):
        """What the step that ends the prompt has computed, before windows slide."""
        (row,) = scheduler.running
        if int(scheduler.rows.num_computed[row] + scheduler._num_new[0]) == len(prompt):
            kv.update((layer, held_kv(loaded, row, layer, len(prompt))) for layer in range(18))
        return update(scheduler, result)

    scheduler.update = watched
    while engine.has_unfinished_requests():
        outputs = engine.step()
    engine.check_invariants()
    answer = outputs[0].outputs[0]
    logprobs = [sorted((one.logprob for one in entry.values()), reverse=True)[:2] for entry in answer.logprobs]
    return Answer(outputs[0].num_cached_tokens, list(answer.token_ids), logprobs, kv)


def held_kv(loaded, row: int, layer: int, num_tokens: int) -> tuple[int, torch.Tensor]:
    manager, cache = loaded.manager, loaded.runner.places[layer].cache
    group = loaded.runner.places[layer].group
    first = int(manager.inspect().rows.first_kept[group, row])
    pages = torch.from_numpy(manager.inspect().rows.pages[group, row, first : -(-num_tokens // PAGE_TOKENS)])
    assert (pages >= 0).all()
    num_held = len(pages) * PAGE_TOKENS
    both = torch.cat([cache.keys[pages].reshape(num_held, -1), cache.values[pages].reshape(num_held, -1)], dim=-1)
    return first * PAGE_TOKENS, both[: num_tokens - first * PAGE_TOKENS].clone()


def kv_error(actual: Answer, expected: Answer, layer: int, first: int) -> tuple[int, float]:
    """(how many positions from `first` on both hold, the largest difference as a share of the largest element)."""
    (start, ours), (oracle_start, theirs) = actual.kv[layer], expected.kv[layer]
    assert oracle_start == 0
    first = max(first, start)
    difference = ours[first - start :] - theirs[first:]
    return len(difference), float(difference.abs().max() / theirs.abs().max())


def assert_same(actual: Answer, expected: Answer) -> None:
    assert actual.token_ids == expected.token_ids
    assert len(expected.logprobs) == NUM_ANSWER_TOKENS
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


def strip(llm) -> None:
    """Let go every window that nobody uses; full-attention KV stays."""
    tree = llm.engine.inspect().manager.inspect().tree
    while tree.strip_one(lambda num_tokens: True):
        pass
    assert (tree.page[tree.windowed_groups] == NULL_PAGE).all()


def test_gemma_answers_from_replayed_windows_as_from_nothing(small_windows):
    with gemma(windowed_replay=False, enable_prefix_caching=False) as llm:
        parted, later, at_the_end = (ask(llm, prompt) for prompt in (PARTED, PARTED_LATER, PARTED_AT_THE_END))
        assert llm.engine.stats().num_cached_tokens == 0

    with gemma() as llm:
        manager = llm.engine.inspect().manager
        manager.inspect().tree.keep_spare = False
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
                assert kv_error(answer, parted, layer, 288)[1] > 1e-2, "nothing was replayed"

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
        llm.engine.inspect().scheduler.chunk_tokens = 37
        answer = ask(llm, PARTED)
        assert answer.num_cached_tokens == 304
        assert_same(answer, parted)
        hits = llm.engine.stats().num_cached_tokens
        assert hits == 570 + 288 + 540 + 304
        for layer in range(18):
            num_compared, error = kv_error(answer, parted, layer, 544 - 15)
            # Chunks begin at 304 + 37 i, the last at 526: its window from 511 on, so blocks from 496 on, is held.
            assert num_compared == 550 - 529
            assert error < KV_TOLERANCE, f"layer {layer}"


# A made-up stack in the shape of gpt-oss: sliding and full layers by turns, sinks, GQA

STACK_PAGE_TOKENS, STACK_WINDOW = 4, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN, VOCAB, LONGEST, SCALE = 16, 50, 128, 0.4
NUM_LAYERS = 6
_SHAPE = {"num_kv_heads": NUM_KV_HEADS, "k_dim": HEAD_DIM, "v_dim": HEAD_DIM, "itemsize_bytes": 4}
SPECS = [SlidingWindowSpec(window_tokens=STACK_WINDOW, **_SHAPE), FullAttentionSpec(**_SHAPE)] * (NUM_LAYERS // 2)


class Stack:
    """As the runner sees a model: projections, attention, residual. Keeps the hidden states of the last call."""

    dtype = torch.float32

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def weights(count: int, rows: int, columns: int) -> torch.Tensor:
            return torch.randn(count, rows, columns, generator=generator) / rows**0.5

        self.embedding, self.place = weights(1, VOCAB, HIDDEN)[0] * 4, weights(1, LONGEST, HIDDEN)[0] * 8
        self.wq = weights(NUM_LAYERS, HIDDEN, NUM_HEADS * HEAD_DIM)
        self.wk, self.wv = (weights(NUM_LAYERS, HIDDEN, NUM_KV_HEADS * HEAD_DIM) for _ in range(2))
        self.wo = weights(NUM_LAYERS, NUM_HEADS * HEAD_DIM, HIDDEN)
        self.sinks = torch.randn(NUM_LAYERS, NUM_HEADS, generator=generator)
        self.hidden = torch.empty(0)

    def attention_params(self, specs):
        return [
            AttentionParams(spec=spec, num_heads=NUM_HEADS, scale=SCALE, sinks=sinks)
            for spec, sinks in zip(specs, self.sinks, strict=True)
        ]

    def __call__(self, token_ids, positions, attention):
        x = self.embedding[token_ids] + self.place[positions]
        for layer in range(NUM_LAYERS):
            q = (x @ self.wq[layer]).view(-1, NUM_HEADS, HEAD_DIM)
            k, v = ((x @ weight[layer]).view(-1, NUM_KV_HEADS, HEAD_DIM) for weight in (self.wk, self.wv))
            x = x + attention(layer, q, k, v).flatten(1) @ self.wo[layer]
        self.hidden = x
        return x

    def logits(self, hidden):
        return hidden @ self.embedding.T


def dense(stack: Stack, tokens: list[int]) -> torch.Tensor:
    """Hidden states float64 [len(tokens), HIDDEN] of the whole sequence at once: no cache, no pages. The sink is one
    more column of scores, whose weight goes nowhere."""
    places = torch.arange(len(tokens))
    distance = places[:, None] - places[None, :]
    x = stack.embedding.double()[tokens] + stack.place.double()[places]
    for layer in range(NUM_LAYERS):
        visible = (distance >= 0) & (distance < (STACK_WINDOW if layer % 2 == 0 else LONGEST))
        q, k, v = (
            (x @ weight[layer].double()).unflatten(1, (-1, HEAD_DIM)) for weight in (stack.wq, stack.wk, stack.wv)
        )
        per_head = []
        for head in range(NUM_HEADS):
            of_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = (q[:, head] @ k[:, of_head].T * SCALE).masked_fill(~visible, -torch.inf)
            sink = stack.sinks[layer, head].double().expand(len(tokens), 1)
            per_head.append(torch.cat([scores, sink], dim=1).softmax(-1)[:, :-1] @ v[:, of_head])
        x = x + torch.cat(per_head, dim=1) @ stack.wo[layer].double()
    return x


def serve(runner, stack, simulation) -> tuple[dict[str, dict[int, torch.Tensor]], dict[str, list[int]]]:
    """Run to the end. Request -> hidden states by position, and the positions that its chunks began at."""
    scheduler = simulation.scheduler
    hidden = {request_id: {} for request_id in simulation.requests}
    starts = {request_id: [] for request_id in simulation.requests}
    while scheduler.has_requests:
        plan = scheduler.schedule()
        requests = [scheduler.rows.request(row) for row in scheduler.scheduled_rows.tolist()]
        result = runner.execute(plan)
        for index, request in enumerate(requests):
            tokens = range(int(plan.query_start[index]), int(plan.query_start[index + 1]))
            starts[request.request_id].append(int(plan.positions[tokens[0]]))
            for token in tokens:
                hidden[request.request_id][int(plan.positions[token])] = stack.hidden[token]
        for new in scheduler.update(result).each():
            simulation.outputs[new.request.request_id].append(new.token_id)
        invariants.check(simulation.manager)
    return hidden, starts


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])
@pytest.mark.parametrize("num_beside", [0, 24], ids=["alone", "in what others leave of a step"])
def test_a_replay_equals_dense_attention_from_the_full_kv_s_end_on(backend, num_beside):
    """A prompt that parts from a cached one at 82, so that full KV of 80 tokens is known: from 80, three sliding
    layers reach back 3 * 7 tokens and the block less one 3 more, to 56. Another prompt takes most of a step's 32
    tokens, so that the first chunk ends inside the replayed range."""
    stack = Stack()
    simulation = Simulation(SPECS, page_tokens=STACK_PAGE_TOKENS, max_model_len=LONGEST, chunk_tokens=32)
    runner = stack_runner(stack, backend, simulation)
    first, other, beside = some_tokens(100, 12, 24)
    parted = part(first, 82, other)
    simulation.add("first", first, 6)
    serve(runner, stack, simulation)

    if num_beside:
        simulation.add("beside", beside, 6)
    replayed = simulation.add("parted", parted, 8)
    hidden, starts = serve(runner, stack, simulation)
    assert replayed.num_cached_tokens == 56
    assert starts["parted"][:3] == ([56, 64, 95] if num_beside else [56, 88, 95])
    expected = dense(stack, parted + simulation.outputs["parted"])
    assert sorted(hidden["parted"]) == list(range(56, len(expected) - 1))
    check(stack, simulation, hidden["parted"], "parted", expected, 80)
    assert float((hidden["parted"][56].double() - expected[56]).abs().max()) > 0.01, "the first token has its window"

    # Parts from it inside a block, which is copied; the first key of its window, 79, is one that the replay committed.
    again = part(parted, 86, other)
    resumed = simulation.add("again", again, 8)
    hidden, _ = serve(runner, stack, simulation)
    assert resumed.num_cached_tokens == 86
    check(stack, simulation, hidden["again"], "again", dense(stack, again + simulation.outputs["again"]), 86)


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])
def test_of_what_was_replayed_only_exact_windows_are_kept(backend):
    """The replay begins at 56, so the third sliding layer's input is exact from 56 + 2 * 7 = 70 on: in whole blocks
    from 72. With that a prompt can resume at 79, whose window begins at 72, but not at 75: its window begins at 68."""
    stack = Stack()
    simulation = Simulation(
        SPECS, page_tokens=STACK_PAGE_TOKENS, max_model_len=LONGEST, chunk_tokens=32, retention=RetentionPolicy()
    )
    runner = stack_runner(stack, backend, simulation)
    first, other = some_tokens(100, 12)
    simulation.add("first", first, 6)
    serve(runner, stack, simulation)
    while simulation.manager.inspect().tree.strip_one(lambda num_tokens: True):
        pass
    parted = part(first, 82, other)
    replayed = simulation.add("parted", parted, 8)
    serve(runner, stack, simulation)
    assert replayed.num_cached_tokens == 56

    # At 75 the full KV of 72 tokens is known, and replayed from 72 - 21 - 3 = 48 on.
    for request_id, position, num_cached_tokens, exact_from in (("late", 79, 79, 79), ("early", 75, 48, 72)):
        prompt = part(parted, position, other)
        request = simulation.add(request_id, prompt, 8)
        hidden, _ = serve(runner, stack, simulation)
        assert request.num_cached_tokens == num_cached_tokens
        expected = dense(stack, prompt + simulation.outputs[request_id])
        check(stack, simulation, hidden[request_id], request_id, expected, exact_from)


def stack_runner(stack, backend, simulation) -> ModelRunner:
    """Over an arena of NaN but for the null slab."""
    layout = simulation.manager.layout
    arena = nan_arena(simulation.manager.inspect().arena.num_slabs * layout.slab_bytes)
    arena[: layout.slab_bytes] = 0
    return ModelRunner(stack, backend, layout, SPECS, arena, prunes=False)


def some_tokens(*counts: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in counts]


def part(prompt: list[int], position: int, rest: list[int]) -> list[int]:
    """As `prompt` up to `position`, another token there, then `rest`."""
    return [*prompt[:position], (prompt[position] + 1) % VOCAB, *rest]


def check(stack, simulation, hidden, request_id: str, expected: torch.Tensor, first: int) -> None:
    """Hidden states from `first` on, and every output token, are the oracle's."""
    actual = torch.stack([hidden[position] for position in range(first, len(expected) - 1)])
    torch.testing.assert_close(actual.double(), expected[first:-1], rtol=1e-4, atol=1e-4)
    num_prompt_tokens = simulation.requests[request_id].num_prompt_tokens
    greedy = stack.logits(expected.float())[num_prompt_tokens - 1 : -1].argmax(-1)
    assert simulation.outputs[request_id] == greedy.tolist()
