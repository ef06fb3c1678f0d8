"""A 6,000-token prompt and 200 tokens of decode, window 512: sliding pages stay within the exact bound.

The weights do not matter here, so the model is a tiny one; everything else is the real engine.
"""

from __future__ import annotations

import numpy as np
import pytest

from lamella import Engine, SamplingParams
from lamella.kv_cache.arena import NULL_PAGE
from tests.helpers.tiny_gemma import save_tiny_gemma

WINDOW = 512
CHUNK = 512
PROMPT = np.random.default_rng(0).integers(6, 320, size=6000).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("window_512")
    save_tiny_gemma(path, sliding_window=WINDOW, max_position_embeddings=8192, num_hidden_layers=3)
    return str(path)


def open_engine(folder, page, interval):
    return Engine(
        model=folder, kv_cache_memory_bytes=2**26, page_size=page, swa_eviction_interval=interval,
        max_num_batched_tokens=CHUNK, max_num_seqs=4, check_invariants=page > 1,  # slow with 6,000 pages
    )  # fmt: skip


def run(engine, request_id, prompt, num_tokens):
    """Sliding pages in the only request's table or left for its end in each step, of prefill and of decode, and its
    last output."""
    engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    prefill, decode, planned = [], [], []
    scheduler = engine.inspect().scheduler
    schedule, manager = type(scheduler).schedule, scheduler.manager
    group = [group.name for group in manager.layout.groups].index("sliding_512")

    def watched():
        plan = schedule(scheduler)
        rows = manager.inspect().rows
        num_left = int((rows.first_kept[group] - rows.first_left[group]).sum())
        planned.append(int((rows.pages[group] != NULL_PAGE).sum()) + num_left)
        return plan

    scheduler.schedule = watched
    while True:
        outputs = engine.step()
        held = planned[-1]
        if outputs and outputs[0].finished:
            return prefill, decode, outputs[0]
        # The step that finishes the prompt gives the first token; decode begins with the second.
        (decode if outputs and len(outputs[0].outputs[0].token_ids) > 1 else prefill).append(held)


@pytest.mark.parametrize(("page", "interval"), [(16, None), (16, 1), (16, 128), (1, 1), (1, 128), (64, 64), (24, 100)])
def test_sliding_pages_of_a_long_request(folder, page, interval):
    decode_bound = 1 + -(-(WINDOW - 1 + max(interval or page, page)) // page)
    prefill_bound = 1 + -(-(WINDOW - 1) // page) + -(-(CHUNK + page - 1) // page)
    with open_engine(folder, page, interval) as engine:
        prefill, decode, last = run(engine, "long", PROMPT, 200)
        assert len(last.outputs[0].token_ids) == 200
        assert len(decode) == 198
        assert max(prefill) <= prefill_bound
        assert max(decode) <= decode_bound
        if (interval or page) % page == 0:
            assert max(decode) == decode_bound, "the bound is no larger than it must be"
        assert all(usage.owned == 0 for usage in engine.stats().pages.values())
        engine.check_invariants()


def test_a_chunk_after_an_unaligned_hit_attains_the_prefill_bound(folder):
    """The hit ends at 1,038 = 14 mod 16: a chunk of 512 meets 33 pages, where one from a page boundary meets 32, and
    before it the window at 1,024 and a block more are 33."""
    with open_engine(folder, 16, None) as engine:
        run(engine, "first", PROMPT[:1040], 2)
        prefill, _, last = run(engine, "second", [*PROMPT[:1038], *PROMPT[3000:4000]], 2)
        assert last.num_cached_tokens == 1038
        assert prefill[0] == 66 == 1 + -(-(WINDOW - 1) // 16) + -(-(CHUNK + 16 - 1) // 16)
        prefill, _, last = run(engine, "aligned", [*PROMPT[4000:5000], *PROMPT[:1000]], 2)
        assert last.num_cached_tokens == 0
        assert max(prefill) == 65
