"""Preemption without waiting for memory to end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lamella import Engine, SamplingParams


def preempt_often(engine: Engine) -> None:
    """From now on the youngest running request goes back to the queue after every third step."""
    scheduler, step, steps = engine.inspect().scheduler, engine.step, itertools.count(1)

    def preempting_step():
        outputs = step()
        if next(steps) % 3 == 0 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return outputs

    engine.step = preempting_step


def run_batch(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], preempted_after: int | None = None
) -> list[list[int]]:
    """The output tokens of all requests (prompt's tokens, parameters) in one batch; every running request is preempted
    after so many steps, None: none is."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    outputs, num_steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
        if num_steps == preempted_after:
            scheduler = engine.inspect().scheduler
            for row in list(scheduler.running):
                scheduler._preempt(row)
    return [outputs[str(index)] for index in range(len(requests))]
