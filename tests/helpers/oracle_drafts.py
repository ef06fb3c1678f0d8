"""A drafter for real engines that knows the outputs from another run, and is wrong at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from lamella import Engine
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.speculation.drafter import Drafter


class OracleDrafts(Drafter):
    """outputs: gives the tokens that a request will have. Each draft is right with the probability `share_right`."""

    outputs: Callable[[Request], Sequence[int]]
    share_right: float
    draw: random.Random
    most_rows = 0  # the most rows with drafts in a step so far

    def drafts(self, rows: RequestRows, room: Mapping[int, int], num_tokens: int, most: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for row, num_free in room.items():
            request = rows.request(row)
            num_drafts = min(num_free, most, self.draw.randint(0, self.settings.num_draft_tokens))
            right = self.outputs(request)[rows.num_tokens[row] - request.num_prompt_tokens :][:num_drafts]
            if len(right):
                found[row] = [one if self.draw.random() < self.share_right else (one + 1) % 300 for one in right]
                most -= len(right)
        self.most_rows = max(self.most_rows, len(found))
        return found


def let_an_oracle_draft(
    engine: Engine, outputs: Callable[[Request], Sequence[int]], share_right: float = 0.8
) -> OracleDrafts:
    """Replace the engine's drafter, before it has requests."""
    scheduler = engine.inspect().scheduler
    assert scheduler.drafter is not None
    oracle = OracleDrafts(scheduler.drafter.settings, scheduler.drafter.costs)
    oracle.outputs, oracle.share_right, oracle.draw = outputs, share_right, random.Random(5)
    scheduler.drafter = oracle
    return oracle
