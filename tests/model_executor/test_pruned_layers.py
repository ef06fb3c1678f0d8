"""Layers that compute only the tokens that something depends on, through scheduler and runner, against dense float64
attention: every memory that nobody has written is NaN, and the region of step pages is NaN before each step."""

from __future__ import annotations

import pytest
import torch

from lamella.attention.contract import AttentionParams
from lamella.attention.native_backend import NativeBackend
from lamella.attention.reference import ReferenceBackend, visible_mask
from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.runner import ModelRunner
from lamella.native.attention import attention_kernels
from tests.helpers.attention_cases import nan_arena
from tests.helpers.reached_tokens import reached_tokens
from tests.helpers.simulation import Simulation

PAGE_TOKENS = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
HIDDEN, VOCAB, LONGEST = 32, 50, 320
SCALE = 0.1
NAN_BYTE = 0xFF

SHAPE = {"num_kv_heads": NUM_KV_HEADS, "k_dim": HEAD_DIM, "v_dim": HEAD_DIM, "itemsize_bytes": 4}
FULL = FullAttentionSpec(**SHAPE)


def sliding(window_tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(window_tokens=window_tokens, **SHAPE)


def chunked(chunk_tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(attention_chunk_tokens=chunk_tokens, **SHAPE)


STACKS = {
    "two sliding layers last": ([sliding(20), FULL, sliding(20), sliding(20)], {}),
    "different windows": ([FULL, sliding(7), sliding(33), chunked(24)], {}),
    "full in the middle": ([sliding(9), sliding(40), FULL, chunked(20), sliding(9)], {}),
    "windows only": ([sliding(12)] * 5, {}),
    "the last layers read others' KV": ([sliding(20), FULL, sliding(20), sliding(20), FULL], {3: 2, 4: 1}),
    "a layer reads another's window for the one above": ([FULL, *[sliding(20)] * 3], {2: 1}),
}
BACKENDS = [ReferenceBackend(), TorchBackend()]
if (kernels := attention_kernels()) is not None:
    BACKENDS.append(NativeBackend(kernels))


class Stack:
    """As the runner sees a model: projections, attention, residual. `num_rows`: per step and layer, how many tokens
    gave K and V (None where the layer has none) and how many Q."""

    dtype = torch.float32

    def __init__(self, num_layers: int, shared: dict[int, int]) -> None:
        generator = torch.Generator().manual_seed(3)

        def weights(rows: int, columns: int) -> list[torch.Tensor]:
            return [torch.randn(rows, columns, generator=generator) / rows**0.5 for _ in range(num_layers)]

        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.place = torch.randn(LONGEST, HIDDEN, generator=generator)
        self.wq, self.wk = weights(HIDDEN, NUM_HEADS * HEAD_DIM), weights(HIDDEN, NUM_KV_HEADS * HEAD_DIM)
        self.wv, self.wo = weights(HIDDEN, NUM_KV_HEADS * HEAD_DIM), weights(NUM_HEADS * HEAD_DIM, HIDDEN)
        self.shared = shared
        self.num_rows: list[list[tuple[int | None, int]]] = []
        self.hidden = torch.empty(0)

    def attention_params(self, specs):
        return [AttentionParams(spec=spec, num_heads=NUM_HEADS, scale=SCALE) for spec in specs]

    def __call__(self, token_ids, positions, attention):
        x = self.embedding[token_ids] + self.place[positions]
        num_rows: list[tuple[int | None, int]] = []
        for layer in range(len(self.wq)):
            k = v = None
            if layer not in self.shared:
                k = (x @ self.wk[layer]).unflatten(1, (-1, HEAD_DIM))
                v = (x @ self.wv[layer]).unflatten(1, (-1, HEAD_DIM))
            rows = attention.output_rows(layer)
            x = x if rows is None else x[rows]
            q = (x @ self.wq[layer]).unflatten(1, (-1, HEAD_DIM))
            x = x + attention(layer, q, k, v).flatten(1) @ self.wo[layer]
            num_rows.append((None if k is None else len(k), len(q)))
        self.num_rows.append(num_rows)
        self.hidden = x
        return x

    def logits(self, hidden):
        return hidden @ self.embedding.T


def dense(stack: Stack, specs, tokens: list[int]) -> torch.Tensor:
    """Hidden states float64 [len(tokens), HIDDEN] of the whole sequence at once: no cache, no pages."""
    places = torch.arange(len(tokens))
    x = stack.embedding.double()[tokens] + stack.place.double()[places]
    kept = {}
    for layer, spec in enumerate(specs):
        if layer not in stack.shared:
            kept[layer] = [(x @ each[layer].double()).unflatten(1, (-1, HEAD_DIM)) for each in (stack.wk, stack.wv)]
        k, v = kept[stack.shared.get(layer, layer)]
        q = (x @ stack.wq[layer].double()).unflatten(1, (-1, HEAD_DIM))
        hidden = ~visible_mask(spec, places, places)
        per_head = []
        for head in range(NUM_HEADS):
            of_head = head * NUM_KV_HEADS // NUM_HEADS
            scores = (q[:, head] @ k[:, of_head].T * SCALE).masked_fill(hidden, -torch.inf)
            per_head.append(scores.softmax(-1) @ v[:, of_head])
        x = x + torch.cat(per_head, dim=1) @ stack.wo[layer].double()
    return x


class Served:
    """Requests run to the end by a runner of its own. `hidden`: request -> position -> what its next token came from;
    `expected_rows`: as Stack.num_rows, found by following dependencies."""

    def __init__(self, specs, sharing, backend, *, prunes=True) -> None:
        self.specs = specs
        self.stack = Stack(len(specs), sharing)
        self.simulation = Simulation(
            specs, page_tokens=PAGE_TOKENS, max_model_len=LONGEST, chunk_tokens=150, step_tokens=150, never_idle=True,
            kv_sharing=sharing,
        )  # fmt: skip
        manager = self.simulation.manager
        self.layout = manager.layout
        self.num_slab_bytes = manager.inspect().arena.num_slabs * self.layout.slab_bytes
        self.arena = nan_arena(self.num_slab_bytes + manager.inspect().step_pages.num_bytes)
        self.arena[: self.layout.slab_bytes] = 0
        self.runner = ModelRunner(self.stack, backend, self.layout, specs, self.arena, prunes=prunes)
        self.hidden: dict[str, dict[int, torch.Tensor]] = {}
        self.expected_rows: list[list[tuple[int | None, int]]] = []
        self.num_tokens = 0

    def step(self) -> None:
        simulation, scheduler = self.simulation, self.simulation.scheduler
        plan = scheduler.schedule()
        self.arena[self.num_slab_bytes :] = NAN_BYTE
        result = self.runner.execute(plan)
        names = [scheduler.rows.request(row).request_id for row in scheduler.scheduled_rows.tolist()]
        sampled = plan.sample_requests.tolist()
        if self.runner.prunes:
            for index, hidden in zip(sampled, self.stack.hidden, strict=True):
                self.hidden.setdefault(names[index], {})[int(plan.seq_lens[index]) - 1] = hidden
        taken, _ = reached_tokens(plan, self.layout, self.specs, simulation.manager.inspect().step_pages.first_page)
        self.expected_rows.append(
            [
                (None if layer in self.stack.shared else len(taken[layer]), len(taken[layer + 1]))
                for layer in range(len(self.specs))
            ]
        )
        self.num_tokens += len(plan.token_ids)
        for new in scheduler.update(result).each():
            simulation.outputs[new.request.request_id].append(new.token_id)


def serve(served: Served) -> None:
    """Chunks of prompts beside decodes; a prompt that parts from another inside a page and one that goes on."""
    generator = torch.Generator().manual_seed(2)
    long, other, tail = (torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (290, 170, 40))
    simulation = served.simulation
    for name, prompt in (("long", long), ("other", other)):
        simulation.add(name, prompt, 6)
        served.step()
    while simulation.scheduler.has_requests:
        served.step()
    simulation.add("parted", [*long[:133], *tail], 4)
    simulation.add("next turn", [*other, *simulation.outputs["other"], *tail, *tail], 4)
    while simulation.scheduler.has_requests:
        served.step()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", STACKS)
def test_outputs_equal_dense_attention_and_no_other_rows_are_computed(name, backend):
    specs, sharing = STACKS[name]
    served = Served(specs, sharing, backend)
    serve(served)
    assert served.stack.num_rows == served.expected_rows
    num_queries = sum(queries for step in served.expected_rows for _, queries in step)
    assert num_queries < served.num_tokens * (len(specs) - 1), "more than the last layer's queries are left out"
    for request_id, hidden in served.hidden.items():
        request, answer = served.simulation.requests[request_id], served.simulation.outputs[request_id]
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        expected = dense(served.stack, specs, [*prompt, *answer])
        assert sorted(hidden) == list(range(len(prompt) - 1, len(prompt) + len(answer) - 1))
        for position, actual in hidden.items():
            torch.testing.assert_close(actual.double(), expected[position], rtol=1e-5, atol=3e-5)
        assert answer == served.stack.logits(expected.float())[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", STACKS)
def test_pages_that_stay_hold_what_they_hold_when_every_layer_computes_all(name):
    """The same steps give the same pages; NaN is where no step has written."""
    specs, sharing = STACKS[name]
    arenas = []
    for prunes in (True, False):
        served = Served(specs, sharing, TorchBackend(), prunes=prunes)
        serve(served)
        assert (served.stack.num_rows == served.expected_rows) is prunes
        arenas.append(served.arena[: served.num_slab_bytes].view(torch.float32))
    assert not arenas[0].isnan().all()
    torch.testing.assert_close(arenas[0], arenas[1], rtol=1e-5, atol=3e-5, equal_nan=True)
