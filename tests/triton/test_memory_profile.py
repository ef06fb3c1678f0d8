"""The profiling run on real tensors, counted as they come and go: no step takes more than it says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lamella import Engine, SamplingParams
from lamella.kv_cache.memory import MemoryProfile
from lamella.kv_cache.sizing import decode_table_widths, table_line_widths
from lamella.model_executor.decode_graphs import batch_sizes
from lamella.model_executor.memory_profile import GRAPH_OVERHEAD_BYTES, LargestBatch, profile_memory
from tests.helpers.storage_counter import CountingMeter, StorageCounter
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma

TOTAL, FOREIGN = 2**30, 12_345_678
NUM_REQUESTS, NUM_TOKENS, MAX_MODEL_LEN = 3, 24, 48
HIDDEN, INTERMEDIATE = 64, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=2, sliding_window_pattern=2, num_attention_heads=2, num_key_value_heads=1)
    return path


def make_engine(folder: Path, attention_backend: str) -> Engine:
    return Engine(
        model=str(folder), attention_backend=attention_backend, dtype="float32", device="cpu",
        max_model_len=MAX_MODEL_LEN, page_size=8, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=NUM_TOKENS,
        kv_cache_memory_bytes=2**21,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with make_engine(folder, "triton") as engine:
        yield engine


def profiled(
    engine: Engine,
    counter: StorageCounter,
    num_tokens: int = NUM_TOKENS,
    *,
    with_graphs: bool,
    max_model_len: int = MAX_MODEL_LEN,
) -> MemoryProfile:
    loaded = engine.inspect()
    widths = decode_table_widths(loaded.layout, max_model_len=max_model_len, interval_tokens=8)
    lines = table_line_widths(loaded.layout, max_model_len=max_model_len, chunk_tokens=num_tokens, interval_tokens=8)
    largest = LargestBatch(NUM_REQUESTS, num_tokens, widths, lines)
    specs = [place.params.spec for place in loaded.runner.places]
    meter = CountingMeter(counter, total=TOTAL, foreign=FOREIGN)
    held = meter.held_bytes()
    runner = loaded.runner
    profile = profile_memory(
        runner.model,
        runner.backend,
        loaded.layout,
        specs,
        meter,
        largest,
        kv_dtype=runner.model.dtype,
        with_graphs=with_graphs,
    )
    assert profile.weights_bytes == held, "the run leaves nothing behind"
    assert profile.foreign_bytes == FOREIGN
    assert profile.total_bytes == TOTAL
    return profile


def test_no_step_takes_more_than_the_profile(engine: Engine) -> None:
    """Prompts that fill a step, prompts beside decodes, and batches that only decode, up to the longest context."""
    loaded = engine.inspect()
    with StorageCounter() as counter:
        profile = profiled(engine, counter, with_graphs=False)
        assert profile.graph_bytes == 0
        launch, peaks = loaded.runner.launch, []
        meter = CountingMeter(counter, total=TOTAL, foreign=FOREIGN)

        def measured(plan):
            results = []
            peaks.append(meter.peak_bytes(lambda: results.append(launch(plan))))
            return results[0]

        loaded.runner.launch = measured
        generator = np.random.default_rng(3)
        for index, length in enumerate((NUM_TOKENS, 9, 41)):
            params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=5, ignore_eos=True, seed=index)
            prompt = generator.integers(6, VOCAB_SIZE, size=length).tolist()
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        loaded.runner.launch = launch
    assert len(peaks) >= 6
    assert max(peaks) <= profile.step_bytes
    assert max(peaks) > 0.6 * profile.step_bytes


@pytest.mark.slow
def test_the_largest_tensors_are_in_the_profile(engine: Engine) -> None:
    """By count: the residual stream, its norm, gate and up of all tokens live at once, and so do logits' rows. It grows
    with the tokens."""
    with StorageCounter() as counter:
        few, many = (profiled(engine, counter, count, with_graphs=False).step_bytes for count in (24, 96))
    for step_bytes, num_tokens in ((few, 24), (many, 96)):
        assert step_bytes >= max(num_tokens * (2 * INTERMEDIATE + 2 * HIDDEN), NUM_REQUESTS * VOCAB_SIZE) * 4
        assert step_bytes <= 4 * (num_tokens * (2 * INTERMEDIATE + 2 * HIDDEN) + NUM_REQUESTS * VOCAB_SIZE) * 4
    assert many > 3 * few


def test_decodes_over_the_widest_tables_are_in_the_profile(folder: Path) -> None:
    """The torch backend gathers what a decoding request sees: K of the whole context of each, 16 float32 a token."""
    max_model_len = 256
    with make_engine(folder, "torch") as engine, StorageCounter() as counter:
        profile = profiled(engine, counter, NUM_REQUESTS, with_graphs=False, max_model_len=max_model_len)
    gathered = NUM_REQUESTS * max_model_len * 16 * 4
    assert gathered > 3 * NUM_REQUESTS * (2 * INTERMEDIATE + 2 * HIDDEN + VOCAB_SIZE) * 4, "activations do not hide it"
    assert gathered <= profile.step_bytes <= 4 * gathered


def test_graphs_are_set_aside(engine: Engine) -> None:
    loaded = engine.inspect()
    with StorageCounter() as counter:
        profile = profiled(engine, counter, with_graphs=True)
    widths = decode_table_widths(loaded.layout, max_model_len=MAX_MODEL_LEN, interval_tokens=8)
    num_groups = len(widths)
    entries = 2 * NUM_REQUESTS + 3 * NUM_REQUESTS + 1 + 2 * num_groups * NUM_REQUESTS
    buffers = 8 * entries + 4 * NUM_REQUESTS * HIDDEN
    own = len(batch_sizes(NUM_REQUESTS)) * GRAPH_OVERHEAD_BYTES
    activations = 4 * NUM_REQUESTS * (2 * INTERMEDIATE + 2 * HIDDEN)
    assert own + buffers + activations <= profile.graph_bytes <= own + buffers + profile.step_bytes


def test_the_counter_counts() -> None:
    """Views count once, and what is let go counts no more."""
    import torch

    with StorageCounter() as counter:
        meter = CountingMeter(counter, total=1000, foreign=100)
        kept = torch.zeros(10)
        view = kept[2:].view(2, 4)
        assert meter.held_bytes() == 40
        assert meter.peak_bytes(lambda: torch.ones(5) + torch.ones(5)) == 60
        assert meter.held_bytes() == 40
        assert meter.free_bytes() == 860
        del kept
        assert meter.held_bytes() == 40
        del view
        assert meter.held_bytes() == 0
        assert meter.peak_bytes(partial(torch.add, torch.zeros(1), 1)) == 4
