"""Layers that read another layer's KV, run through the runner and held against dense float64 attention.

The stack is a made-up model: projections, attention, residual. Everything in the arena that no layer has written is
NaN, so a read of a page that the owner did not write cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from lamella.attention.contract import AttentionParams, attend
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.errors import InvariantError, ModelLoadError
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, kv_sharing
from lamella.model_executor.models.config_json import shared_kv_owners
from lamella.model_executor.runner import ModelRunner
from tests.helpers.attention_cases import Ragged, forget_memo, make_case, nan_arena
from tests.helpers.simulation import Simulation

WINDOW_TOKENS = 6
PAGE_TOKENS = 4
NUM_HEADS, NUM_KV_HEADS, K_DIM, V_DIM = 4, 2, 8, 4
HIDDEN, VOCAB, LONGEST = 16, 50, 64
SCALE = 0.4

SHAPE = {"num_kv_heads": NUM_KV_HEADS, "k_dim": K_DIM, "v_dim": V_DIM, "itemsize_bytes": 4}
SLIDING = SlidingWindowSpec(window_tokens=WINDOW_TOKENS, **SHAPE)
FULL = FullAttentionSpec(**SHAPE)


class Stack:
    """As the runner sees a model. `shared` layers pass no K and V. Keeps the hidden states of the last call."""

    dtype = torch.float32

    def __init__(self, num_layers: int, shared: Mapping[int, int]) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / rows**0.5

        self.embedding, self.place = weight(VOCAB, HIDDEN) * 4, weight(LONGEST, HIDDEN) * 4
        self.wq = [weight(HIDDEN, NUM_HEADS * K_DIM) for _ in range(num_layers)]
        self.wk = [weight(HIDDEN, NUM_KV_HEADS * K_DIM) for _ in range(num_layers)]
        self.wv = [weight(HIDDEN, NUM_KV_HEADS * V_DIM) for _ in range(num_layers)]
        self.wo = [weight(NUM_HEADS * V_DIM, HIDDEN) for _ in range(num_layers)]
        self.shared = shared
        self.hidden = torch.empty(0)

    def attention_params(self, specs):
        return [AttentionParams(spec=spec, num_heads=NUM_HEADS, scale=SCALE) for spec in specs]

    def __call__(self, token_ids, positions, attention):
        x = self.embedding[token_ids] + self.place[positions]
        for layer in range(len(self.wq)):
            q = (x @ self.wq[layer]).view(-1, NUM_HEADS, K_DIM)
            k = v = None
            if layer not in self.shared:
                k = (x @ self.wk[layer]).view(-1, NUM_KV_HEADS, K_DIM)
                v = (x @ self.wv[layer]).view(-1, NUM_KV_HEADS, V_DIM)
            x = x + attention(layer, q, k, v).flatten(1) @ self.wo[layer]
        self.hidden = x
        return x

    def logits(self, hidden):
        return hidden @ self.embedding.T


def dense(stack: Stack, is_sliding: list[bool], sharing: Mapping[int, int], tokens: list[int]) -> torch.Tensor:
    """Hidden states float64 [len(tokens), HIDDEN] of the whole sequence at once, no cache and no pages."""
    places = torch.arange(len(tokens))
    x = stack.embedding.double()[tokens] + stack.place.double()[places]
    distance = places[:, None] - places[None, :]
    kept = {}
    for layer, slides in enumerate(is_sliding):
        q = (x @ stack.wq[layer].double()).view(-1, NUM_HEADS, K_DIM)
        if layer not in sharing:
            k = (x @ stack.wk[layer].double()).view(-1, NUM_KV_HEADS, K_DIM)
            v = (x @ stack.wv[layer].double()).view(-1, NUM_KV_HEADS, V_DIM)
            kept[layer] = k, v
        k, v = kept[sharing.get(layer, layer)]
        visible = (distance >= 0) & (distance < WINDOW_TOKENS) if slides else distance >= 0
        per_head = []
        for head in range(NUM_HEADS):
            of_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = (q[:, head] @ k[:, of_head].T * SCALE).masked_fill(~visible, -torch.inf)
            per_head.append(scores.softmax(-1) @ v[:, of_head])
        x = x + torch.cat(per_head, dim=1) @ stack.wo[layer].double()
    return x


def make_runner(stack, backend, specs, sharing, simulation, *, uniform=False):
    layout = build_layout(without_sliding(specs) if uniform else specs, page_tokens=PAGE_TOKENS, kv_sharing=sharing)
    # Who plans and gives out pages sees groups only, and those are the owners' alone.
    assert layout.groups == simulation.manager.layout.groups
    arena = nan_arena(simulation.manager.inspect().arena.num_slabs * layout.slab_bytes)
    arena[: layout.slab_bytes] = 0
    return ModelRunner(stack, backend, layout, specs, arena, prunes=False)


def simulate(specs, sharing, *, uniform=False):
    """The scheduler and block manager of the owners. Chunks of 7 tokens: they end inside pages and windows."""
    owners = [spec for layer, spec in enumerate(specs) if layer not in sharing]
    stored = without_sliding(owners) if uniform else owners
    return Simulation(stored, page_tokens=PAGE_TOKENS, max_model_len=LONGEST, chunk_tokens=7)


def serve(runner, stack, simulation):
    """Run to the end. Request -> the hidden states of the positions computed for it, by position."""
    scheduler = simulation.scheduler
    hidden = {request_id: {} for request_id in simulation.requests}
    while scheduler.has_requests:
        plan = scheduler.schedule()
        requests = [scheduler.rows.request(row) for row in scheduler._scheduled.tolist()]
        result = runner.execute(plan)
        for index, request in enumerate(requests):
            for token in range(int(plan.query_start[index]), int(plan.query_start[index + 1])):
                hidden[request.request_id][int(plan.positions[token])] = stack.hidden[token]
        for new in scheduler.update(result).each():
            simulation.outputs[new.request.request_id].append(new.token_id)
    return hidden


STACKS = {
    "one owner of each kind": ([SLIDING, FULL, SLIDING, FULL], {2: 0, 3: 1}),
    "the second sliding owner": ([SLIDING, SLIDING, FULL, SLIDING, FULL], {3: 1, 4: 2}),
    "the first sliding owner": ([SLIDING, SLIDING, FULL, SLIDING, FULL], {3: 0, 4: 2}),
}


@pytest.mark.parametrize("uniform", [False, True], ids=["hybrid", "uniform"])
@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])
@pytest.mark.parametrize("name", STACKS)
def test_a_shared_layer_reads_its_owners_kv(name, backend, uniform):
    """Chunked prefill, decode past the window, a batch of both, and a prompt whose first 27 tokens are cached."""
    specs, sharing = STACKS[name]
    stack = Stack(len(specs), sharing)
    simulation = simulate(specs, sharing, uniform=uniform)
    runner = make_runner(stack, backend, specs, sharing, simulation, uniform=uniform)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        "long": torch.randint(VOCAB, (23,), generator=generator).tolist(),
        "short": torch.randint(VOCAB, (5,), generator=generator).tolist(),
    }
    for request_id, prompt in prompts.items():
        simulation.add(request_id, prompt, 12)
    hidden = serve(runner, stack, simulation)
    prompts["again"] = prompts["long"] + simulation.outputs["long"][:4] + [7]
    again = simulation.add("again", prompts["again"], 5)
    hidden["again"] = serve(runner, stack, simulation)["again"]
    assert again.num_cached_tokens == 27

    is_sliding = [spec is SLIDING for spec in specs]
    for request_id, prompt in prompts.items():
        output = simulation.outputs[request_id]
        expected = dense(stack, is_sliding, sharing, prompt + output)
        first = again.num_cached_tokens if request_id == "again" else 0
        assert sorted(hidden[request_id]) == list(range(first, len(prompt + output) - 1))
        actual = torch.stack([hidden[request_id][position] for position in sorted(hidden[request_id])])
        torch.testing.assert_close(actual.double(), expected[first:-1], rtol=1e-4, atol=1e-4)
        greedy = stack.logits(expected.float())[len(prompt) - 1 : -1].argmax(-1)
        assert output == greedy.tolist()


def test_the_oracle_tells_one_owner_from_another():
    """Or the test above would say nothing about whose KV is read."""
    specs, first = STACKS["the first sliding owner"]
    _, second = STACKS["the second sliding owner"]
    stack = Stack(len(specs), first)
    is_sliding = [spec is SLIDING for spec in specs]
    tokens = list(range(20))
    assert not torch.allclose(
        dense(stack, is_sliding, first, tokens), dense(stack, is_sliding, second, tokens), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("gives_none", "message"),
    [({3: 1}, "layer 2 gave K and V, but by the KV layout it reads those of layer 0"),
     ({1: 0, 2: 0, 3: 1}, "layer 1 gave no K and V, but by the KV layout it keeps its own")],
)  # fmt: skip
def test_a_model_that_disagrees_with_the_layout_is_stopped(gives_none, message):
    specs, sharing = STACKS["one owner of each kind"]
    stack = Stack(len(specs), gives_none)
    simulation = simulate(specs, sharing)
    runner = make_runner(stack, ReferenceBackend(), specs, sharing, simulation)
    simulation.add("r", range(5), 1)
    with pytest.raises(InvariantError, match=message):
        runner.execute(simulation.scheduler.schedule())


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])
@pytest.mark.parametrize("spec", [SLIDING, FULL], ids=["sliding", "full"])
def test_attention_without_k_and_v_writes_nothing_and_sees_what_is_there(backend, spec):
    case = make_case(spec, [Ragged(9), Ragged(20), Ragged(3, 11)], num_heads=NUM_HEADS, page_tokens=PAGE_TOKENS)
    expected, written = case.run(ReferenceBackend())
    arena = written.clone()
    forget_memo(case.metadata)
    out = attend(backend, case.params, case.cache(backend, arena), case.query, None, None, case.metadata)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(arena, written)


@pytest.mark.parametrize("given", ["key", "value"])
def test_attention_takes_k_and_v_or_neither(given):
    case = make_case(FULL, [Ragged(3)], num_heads=NUM_HEADS, page_tokens=PAGE_TOKENS)
    backend = ReferenceBackend()
    new = {"key": case.new_keys, "value": case.new_values}
    key, value = (new[name] if name == given else None for name in ("key", "value"))
    with pytest.raises(InvariantError, match="only one of K and V"):
        attend(backend, case.params, case.cache(backend, case.arena), case.query, key, value, case.metadata)


# Configs


def test_shared_layers_read_the_last_owner_of_their_kind():
    """Gemma 3n E4B: 35 layers, every fifth full, the last 15 share."""
    kinds = ["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(35)]
    owners = shared_kv_owners(kinds, 15)
    assert owners == {layer: 19 if layer in (24, 29, 34) else 18 for layer in range(20, 35)}
    assert shared_kv_owners(kinds, 0) == {}


@pytest.mark.parametrize(
    ("num_shared", "message"),
    [(3, "layer 2 is 'full_attention', but no layer before 1 is"), (4, "no layer keeps KV"), (True, "=True")],
)
def test_sharing_that_cannot_be_is_refused(num_shared, message):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(ModelLoadError, match=message):
        shared_kv_owners(kinds, num_shared)


def test_a_model_config_says_who_shares():
    shape = {"num_heads": 1, "num_kv_heads": 1, "k_dim": 8, "v_dim": 8, "scale": 1.0, "rotary": None}
    attentions = [AttentionConfig(kind="full_attention", kv_owner=owner, **shape) for owner in (None, 0, None)]
    config = ModelConfig(
        architecture="none", vocab_size=8, hidden_size=8, norm_eps=1e-6, max_position_embeddings=8,
        layers=tuple(LayerConfig(each, MLPConfig(8, "silu")) for each in attentions), tie_word_embeddings=True,
    )  # fmt: skip
    assert kv_sharing(config) == {1: 0}
