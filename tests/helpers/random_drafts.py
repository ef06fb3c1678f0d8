"""A drafter that knows what a fake model will say, and is wrong at random."""

from __future__ import annotations

import random
from collections.abc import Mapping

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from tests.helpers.fake_executor import VOCAB, foretell


class RandomDrafts(Drafter):
    """Up to `most` drafts for every row that may have some; each is right with the probability `share_right`."""

    def __init__(self, most: int, share_right: float = 0.8, seed: int = 0) -> None:
        super().__init__(SpeculationSettings(num_draft_tokens=most), StepCosts([1], [1.0]))
        self.share_right = share_right
        self._draw = random.Random(seed)

    def drafts(self, rows: RequestRows, room: Mapping[int, int], num_tokens: int, most: int) -> dict[int, list[int]]:
        found = {}
        for row, num_free in room.items():
            num_drafts = min(num_free, most, self._draw.randint(0, self.settings.num_draft_tokens))
            if num_drafts > 0:
                known = rows.tokens[row, : rows.num_tokens[row]].tolist()
                right = foretell(rows.request(row).salt, known, num_drafts)
                found[row] = [
                    token if self._draw.random() < self.share_right else self._draw.randrange(VOCAB) for token in right
                ]
                most -= num_drafts
        return found
