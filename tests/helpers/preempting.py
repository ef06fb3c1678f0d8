"""Preemption without waiting for memory to end."""

from __future__ import annotations

import itertools

from lamella import Engine


def preempt_often(engine: Engine) -> None:
    """From now on the youngest running request goes back to the queue after every third step."""
    scheduler, step, steps = engine.inspect().scheduler, engine.step, itertools.count(1)

    def preempting_step():
        outputs = step()
        if next(steps) % 3 == 0 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return outputs

    engine.step = preempting_step
