"""Bit for bit: a row's result depends on its own keys and on nothing that comes with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lamella.attention.contract import AttentionParams, LayerCache, attend
from lamella.attention.metadata import AttentionMetadata
from lamella.attention.native_backend import NativeBackend
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.native.attention import AttentionKernels
from lamella.native.library import NativeLibrary
from tests.helpers.attention_cases import make_metadata, nan_arena

SHAPE = {"num_kv_heads": 2, "k_dim": 48, "v_dim": 32, "itemsize_bytes": 4}
SPECS = [
    FullAttentionSpec(**SHAPE),
    SlidingWindowSpec(window_tokens=100, **SHAPE),
    ChunkedLocalAttentionSpec(attention_chunk_tokens=90, **SHAPE),
]
NUM_SEQUENCES, SEQ_LEN, NUM_HEADS = 3, 300, 8


@pytest.fixture(scope="module")
def backend(native_library: NativeLibrary) -> NativeBackend:
    return NativeBackend(AttentionKernels(native_library))


@dataclass(frozen=True)
class Sequences:
    """Q, K and V of a few sequences: [NUM_SEQUENCES, SEQ_LEN, heads, dim]."""

    params: AttentionParams
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_sequences(spec: KVCacheSpec, softcap: float | None = None, with_sinks: bool = False) -> Sequences:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sinks = randn(NUM_HEADS) if with_sinks else None
    heads, k_dim, v_dim = spec.num_kv_heads, spec.k_dim, spec.v_dim
    return Sequences(
        AttentionParams(spec, NUM_HEADS, k_dim**-0.5, softcap, sinks),
        randn(NUM_SEQUENCES, SEQ_LEN, NUM_HEADS, k_dim),
        randn(NUM_SEQUENCES, SEQ_LEN, heads, k_dim),
        randn(NUM_SEQUENCES, SEQ_LEN, heads, v_dim),
    )


class PagedRun:
    """Computes sequences step by step in scattered pages, and gathers the rows' outputs."""

    def __init__(self, backend: NativeBackend, sequences: Sequences, page_tokens: int, seed: int) -> None:
        self.backend, self.sequences, self.page_tokens = backend, sequences, page_tokens
        self.rng = np.random.default_rng(seed)
        num_blocks = -(-SEQ_LEN // page_tokens)
        self.tables = 1 + self.rng.permutation(NUM_SEQUENCES * num_blocks).reshape(NUM_SEQUENCES, num_blocks)
        spec = sequences.params.spec
        unit_bytes = page_tokens * spec.token_bytes
        arena = nan_arena((NUM_SEQUENCES * num_blocks + 1) * unit_bytes)
        self.cache: LayerCache = backend.layer_cache(
            arena,
            spec=spec,
            dtype=torch.float32,
            page_tokens=page_tokens,
            unit_bytes=unit_bytes,
            offset_bytes=0,
        )
        self.done = np.zeros(NUM_SEQUENCES, dtype=np.int64)
        self.out = torch.full((NUM_SEQUENCES, SEQ_LEN, NUM_HEADS, spec.v_dim), float("nan"))

    def step(self, lengths: dict[int, int]) -> None:
        """The next tokens of some sequences. Single tokens come first and are decoded."""
        order = sorted(lengths, key=lambda one: (lengths[one] > 1, self.rng.random()))
        rows = [(one, position) for one in order for position in range(self.done[one], self.done[one] + lengths[one])]
        metadata = self._metadata(order, lengths, rows)
        which, positions = np.array(rows).T
        sequences = self.sequences
        query, key, value = (tensor[which, positions] for tensor in (sequences.query, sequences.key, sequences.value))
        self.out[which, positions] = attend(self.backend, sequences.params, self.cache, query, key, value, metadata)
        for one in order:
            self.done[one] += lengths[one]

    def _metadata(self, order: list[int], lengths: dict[int, int], rows: list[tuple[int, int]]) -> AttentionMetadata:
        page_tokens, spec = self.page_tokens, self.sequences.params.spec
        # As few blocks below the window as there need be, or some more.
        first_blocks = np.array(
            [self.rng.integers(0, spec.first_visible(int(self.done[one])) // page_tokens + 1) for one in order]
        )
        tables = np.full((len(order), self.tables.shape[1]), -1, dtype=np.int64)
        for i, one in enumerate(order):
            stop = (self.done[one] + lengths[one] - 1) // page_tokens + 1
            tables[i, : stop - first_blocks[i]] = self.tables[one, first_blocks[i] : stop]
        slots = [
            self.tables[one, position // page_tokens] * page_tokens + position % page_tokens for one, position in rows
        ]
        return make_metadata(
            page_tokens=page_tokens,
            num_decodes=sum(lengths[one] == 1 for one in order),
            query_start=np.cumsum([0] + [lengths[one] for one in order]),
            seq_lens=np.array([self.done[one] + lengths[one] for one in order]),
            first_blocks=first_blocks,
            block_tables=tables,
            slot_mapping=np.array(slots),
        )


def one_shot(backend: NativeBackend, sequences: Sequences) -> torch.Tensor:
    """Each sequence alone, as one prefill, in the smallest pages."""
    run = PagedRun(backend, sequences, 16, seed=0)
    for one in range(NUM_SEQUENCES):
        run.step({one: SEQ_LEN})
    assert run.out.isfinite().all()
    return run.out


def random_steps(run: PagedRun) -> None:
    """Chunks of any size and single tokens of any of the sequences, until all are done."""
    while (run.done < SEQ_LEN).any():
        lengths = {}
        for one in np.flatnonzero(run.done < SEQ_LEN):
            kind = run.rng.random()
            longest = SEQ_LEN - int(run.done[one])
            if kind < 0.7:
                lengths[int(one)] = 1 if kind < 0.3 else int(run.rng.integers(1, min(longest, 70) + 1))
        if lengths:
            run.step(lengths)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, True)])
def test_chunks_batches_pages_and_threads_change_no_bit(
    backend: NativeBackend, spec: KVCacheSpec, softcap: float | None, with_sinks: bool
) -> None:
    sequences = make_sequences(spec, softcap, with_sinks)
    expected = one_shot(backend, sequences)
    for seed, page_tokens in enumerate((16, 32, 64, 128)):
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            run = PagedRun(backend, sequences, page_tokens, seed)
            random_steps(run)
            assert torch.equal(run.out, expected)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_decoded_row_is_the_last_row_of_a_prefill(backend: NativeBackend, spec: KVCacheSpec) -> None:
    sequences = make_sequences(spec)
    expected = one_shot(backend, sequences)
    run = PagedRun(backend, sequences, 64, seed=3)
    for _ in range(SEQ_LEN):
        run.step(dict.fromkeys(range(NUM_SEQUENCES), 1))
    assert torch.equal(run.out, expected)


@pytest.mark.parametrize("num_heads", [2, 6, 14])
def test_other_head_ratios(backend: NativeBackend, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NUM_HEADS", num_heads)
    sequences = make_sequences(SPECS[1])
    expected = one_shot(backend, sequences)
    run = PagedRun(backend, sequences, 32, seed=5)
    random_steps(run)
    assert torch.equal(run.out, expected)


def test_decode_and_prefill_apart_give_what_one_call_gives(backend: NativeBackend) -> None:
    sequences = make_sequences(SPECS[1])
    run = PagedRun(backend, sequences, 16, seed=2)
    run.step({0: 130, 1: 7})
    lengths = {0: 1, 1: 50, 2: 33}
    rows = [(one, position) for one in lengths for position in range(run.done[one], run.done[one] + lengths[one])]
    metadata = run._metadata([0, 1, 2], lengths, rows)
    which, positions = np.array(rows).T
    query = sequences.query[which, positions]
    backend.write_kv(run.cache, sequences.key[which, positions], sequences.value[which, positions], metadata)
    together = torch.empty(len(rows), NUM_HEADS, SHAPE["v_dim"])
    backend.attend_all(sequences.params, run.cache, query, metadata, together)
    apart = torch.empty_like(together)
    backend.decode(sequences.params, run.cache, query[:1], metadata, apart[:1])
    backend.prefill(sequences.params, run.cache, query[1:], metadata, apart[1:])
    assert torch.equal(apart, together)
    assert together.isfinite().all()


def test_two_python_threads_at_once(backend: NativeBackend) -> None:
    """As two engines in one process: each gets what it gets alone."""
    worlds = [make_sequences(spec) for spec in SPECS[:2]]
    expected = [one_shot(backend, sequences) for sequences in worlds]
    results: list[list[torch.Tensor]] = [[], []]
    start = threading.Barrier(2)

    def work(world: int) -> None:
        torch.set_num_threads(2)
        start.wait()
        for seed in range(3):
            run = PagedRun(backend, worlds[world], 32, seed)
            random_steps(run)
            results[world].append(run.out)

    threads = [threading.Thread(target=work, args=(world,)) for world in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for world in (0, 1):
        assert len(results[world]) == 3
        assert all(torch.equal(out, expected[world]) for out in results[world])
