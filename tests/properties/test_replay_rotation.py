"""Two sessions whose windows do not fit side by side, with and without windowed replay: bookkeeping only."""

from __future__ import annotations

import numpy as np

from kv_replay.drive import Driver
from kv_replay.layouts import layer_specs
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache import invariants
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.spec import ceil_div

PAGE_TOKENS = 16
CHUNK_TOKENS = 2048
WINDOW_TOKENS, NUM_SLIDING_LAYERS = 128, 12
CONTEXT_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 30_000, 2_050, 40  # a turn's tokens fill the windowed pool
NUM_TURNS = 2  # of each session, after the first that brings its context
MAX_MODEL_LEN = 36_000


def make_scheduler(*, windowed_replay: bool) -> Scheduler:
    """Fixed pools: full pages for both sessions, windowed ones for a chunk and the window before it, once."""
    layout = build_layout(layer_specs("gpt-oss-20b"), page_tokens=PAGE_TOKENS)
    assert [group.pages_per_slab for group in layout.groups] == [1, 1]
    num_windowed = ceil_div(WINDOW_TOKENS - 1 + CHUNK_TOKENS + PAGE_TOKENS - 1, PAGE_TOKENS)
    num_full = 2 * ceil_div(MAX_MODEL_LEN, PAGE_TOKENS)
    quota = tuple(num_windowed if group.spec.is_windowed else num_full for group in layout.groups)
    manager = BlockManager(
        layout,
        num_slabs=1 + sum(quota),
        num_rows=4,
        max_model_len=MAX_MODEL_LEN,
        interval_tokens=PAGE_TOKENS,
        slab_quota=quota,
        windowed_replay=windowed_replay,
    )
    return Scheduler(
        manager,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=CHUNK_TOKENS,
    )


def rotate(scheduler: Scheduler) -> list[int]:
    """Prompt tokens computed for each turn, the sessions by turns; outputs are not counted."""
    driver = Driver(scheduler, budget_bytes=1)
    rng = np.random.default_rng(0)

    def some(count: int) -> np.ndarray:
        return rng.integers(0, 200_000, count, dtype=np.int32)

    contexts = [some(CONTEXT_TOKENS), some(CONTEXT_TOKENS)]
    computed = []
    for turn in range(2 * (1 + NUM_TURNS)):
        session, output = turn % 2, some(OUTPUT_TOKENS)
        if turn >= 2:
            contexts[session] = np.concatenate([contexts[session], some(TURN_TOKENS)])
        before = driver.num_computed_tokens
        driver.add(f"turn {turn}", contexts[session], output)
        while scheduler.has_requests:
            driver.step()
        contexts[session] = np.concatenate([contexts[session], output])
        # The step that ends the prompt gives the first output token, so the others took a step of one token each.
        computed.append(driver.num_computed_tokens - before - (OUTPUT_TOKENS - 1))
    invariants.check(scheduler.manager)
    assert scheduler.counters().num_preemptions == 0
    return computed


def known_tokens(turn: int) -> int:
    """What is computed of a session's tokens when its turn comes: all but the last output token."""
    earlier = turn // 2 - 1
    return CONTEXT_TOKENS + OUTPUT_TOKENS + earlier * (TURN_TOKENS + OUTPUT_TOKENS) - 1


def with_replay(turn: int) -> int:
    """By hand: whole blocks are known, and before their end twelve layers' windows and a block less one token are
    replayed, from a block boundary."""
    resume = known_tokens(turn) // PAGE_TOKENS * PAGE_TOKENS
    start = resume - NUM_SLIDING_LAYERS * (WINDOW_TOKENS - 1) - (PAGE_TOKENS - 1)
    return known_tokens(turn) + 1 + TURN_TOKENS - start // PAGE_TOKENS * PAGE_TOKENS


def test_a_rotation_recovers_its_windows_for_a_quarter_of_the_recompute_tokens():
    replayed = rotate(make_scheduler(windowed_replay=True))
    recomputed = rotate(make_scheduler(windowed_replay=False))
    assert replayed[:2] == recomputed[:2] == [CONTEXT_TOKENS] * 2
    # Without replay every token of a turn's prompt is computed again: its windows' end took the full KV along.
    assert recomputed[2:] == [32_090, 32_090, 34_180, 34_180]
    assert replayed[2:] == [with_replay(turn) for turn in range(2, 6)] == [3_610, 3_610, 3_604, 3_604]
    # The new tokens of the turns are in both; what is left is what an evicted window cost.
    new_tokens = 4 * TURN_TOKENS
    assert 4 * (sum(replayed[2:]) - new_tokens) <= sum(recomputed[2:]) - new_tokens
    assert 4 * sum(replayed[2:]) <= sum(recomputed[2:])
