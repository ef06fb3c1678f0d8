"""Measures what steps of several sizes take, before there are requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from lamella.kv_cache.block_manager import BlockManager
from lamella.model_executor.runner import ModelRunner

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_CONTEXT_TOKENS = 256
# Every size is measured so often, and the shortest time counts: what is longer was disturbed.
_MOST_PASSES = 3
# No pass begins after so long, and larger sizes than the first few are left out.
_MOST_SECONDS = 4.0
_FEWEST_SIZES = 4
_MOST_ATTEMPTS = _CONTEXT_TOKENS + 2  # as many as a prompt may have chunks, and two more


class _FixedDrafts(Drafter):
    """As many drafts as it is told, of any tokens."""

    num_drafts = 0

    def drafts(self, rows: RequestRows, room: Mapping[int, int], num_tokens: int, most: int) -> dict[int, list[int]]:
        return {row: [1] * min(self.num_drafts, num_free, most) for row, num_free in room.items()}


def measure_step_costs(
    runner: ModelRunner, manager: BlockManager, *, vocab_size: int, chunk_tokens: int, max_tokens: int
) -> StepCosts:
    """Run steps of a request alone that verifies more and more drafts, up to `max_tokens` tokens a step.

    runner, manager: over an arena whose contents nobody needs; neither is to be used afterwards. chunk_tokens: the most
    prompt tokens in a step. Where the model gives no usable logits, all steps count as equal.
    """
    max_model_len = manager.settings.max_model_len
    sizes = [size for size in _SIZES if size <= min(max_tokens, max_model_len // 2)] or [1]
    context = max(1, min(_CONTEXT_TOKENS, max_model_len // 4))
    drafter = _FixedDrafts(SpeculationSettings(num_draft_tokens=sizes[-1]), StepCosts([1], [1.0]))
    scheduler = Scheduler(
        manager,
        max_num_seqs=1,
        max_num_batched_tokens=max(chunk_tokens, sizes[-1]),
        max_model_len=max_model_len,
        chunk_tokens=chunk_tokens,
        drafter=drafter,
    )
    num_added = 0

    def step(size: int) -> float:
        """The seconds of one step; infinite where none of this size comes about. What comes out does not matter."""
        nonlocal num_added
        for _ in range(_MOST_ATTEMPTS):
            running = scheduler.running
            if running and max_model_len - int(scheduler.rows.num_tokens[running[0]]) <= size:
                scheduler.finish(scheduler.rows.request(running[0]), "abort")
                running = scheduler.running
            if not running:
                num_added += 1
                scheduler.add(_request(num_added, context, vocab_size, max_model_len))
            drafter.num_drafts = size - 1
            started = time.perf_counter()
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(runner.execute(plan))
            if len(plan.token_ids) == size and plan.num_samples == size:
                return time.perf_counter() - started
        return math.inf

    started = time.monotonic()
    step(sizes[-1] if len(sizes) == 1 else sizes[1])  # what is made at a first call is made here
    best = dict.fromkeys(sizes, math.inf)
    for _ in range(_MOST_PASSES):
        for number, size in enumerate(sizes):
            if time.monotonic() - started > _MOST_SECONDS and number >= _FEWEST_SIZES:
                break
            best[size] = min(best[size], step(size))
        if time.monotonic() - started > _MOST_SECONDS:
            break
    measured = [size for size in sizes if best[size] < math.inf]
    if not measured:
        return StepCosts([1], [1.0])
    seconds = consistent_seconds(measured, [best[size] for size in measured])
    logger.info(
        "steps of %s tokens take %s ms (measured in %.1f s): so many drafts are made as pay",
        ", ".join(map(str, measured)),
        ", ".join(f"{1e3 * one:.2f}" for one in seconds),
        time.monotonic() - started,
    )
    return StepCosts(measured, seconds)


def consistent_seconds(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """What was measured, less what something else must have taken: more tokens take no less time, and no more than in
    two steps. sizes: ascending, the first is 1."""
    found = np.minimum.accumulate(np.array(seconds, dtype=np.float64)[::-1])[::-1]
    for index in range(1, len(sizes)):
        rest = sizes[index] - np.array(sizes[:index])
        in_two = found[:index] + np.interp(rest, sizes[:index], found[:index])
        # Beyond the sizes so far it takes more than two steps, of which nothing is known.
        found[index] = min(found[index], in_two[rest <= sizes[index - 1]].min(initial=math.inf))
    return [float(one) for one in found]


def _request(number: int, num_tokens: int, vocab_size: int, max_total_tokens: int) -> Request:
    token_ids = np.random.default_rng(number).integers(0, vocab_size, size=num_tokens, dtype=np.int32)
    return Request(
        request_id=f"probe {number}",
        sample_index=0,
        params=SamplingParams(temperature=0),
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        max_total_tokens=max_total_tokens,
        seed=0,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        arrival_time=0.0,
    )
