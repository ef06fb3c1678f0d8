"""Steps planned by hand for a runner: sequences with pages of their own, without scheduler or block manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.page_transfers import PageCopies
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.step_memory import GroupPlan
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_plan import SamplingBatch, StepPlan


class Turn(NamedTuple):
    """What a step computes of one sequence: tokens [first, stop), and behind how many of the last it samples."""

    sequence: int
    first: int
    stop: int
    num_sampled: int


class PagedSequences:
    """Every sequence has a page for each of its blocks in every group, windowed or not.

    keeps_windows: False: the windowed groups' pages are step pages, so that what they hold is for one step alone.
    """

    def __init__(self, runner: ModelRunner, sequences: list[list[int]], *, keeps_windows: bool) -> None:
        self._layout, self._sequences = runner.layout, sequences
        page_tokens = self._layout.page_tokens
        runner.arena.fill_(0xFF)  # NaN: what nobody has written must not be read
        runner.arena[: self._layout.slab_bytes] = 0
        unit, self.first_step_slot = self._layout.slab_units, runner.arena.numel()
        self._tables: dict[int, np.ndarray] = {}
        for group in sorted(
            range(len(self._layout.groups)), key=lambda group: self._layout.groups[group].spec.is_windowed
        ):
            spec = self._layout.groups[group]
            if spec.spec.is_windowed and not keeps_windows:
                self.first_step_slot = min(self.first_step_slot, unit * page_tokens)
            width = max(ceil_div(len(tokens), page_tokens) for tokens in sequences)
            pages = unit + spec.page_units * np.arange(len(sequences) * width)
            self._tables[group] = pages.reshape(len(sequences), width)
            unit = int(pages[-1]) + spec.page_units
        assert unit * self._layout.unit_bytes <= runner.arena.numel()

    def plan(self, turns: list[Turn], sampling: SamplingBatch, token_sources: np.ndarray | None = None) -> StepPlan:
        """turns: those of one token first."""
        page_tokens, none = self._layout.page_tokens, np.zeros(0, dtype=np.int64)
        sequences = [turn.sequence for turn in turns]
        lengths = [turn.stop - turn.first for turn in turns]
        positions = np.concatenate([np.arange(turn.first, turn.stop) for turn in turns])
        zeros = np.zeros(len(turns), dtype=np.int64)
        groups = []
        for group in range(len(self._layout.groups)):
            tables = self._tables[group][sequences]
            pages = tables[np.repeat(np.arange(len(turns)), lengths), positions // page_tokens]
            slots = pages * page_tokens + positions % page_tokens
            groups.append(GroupPlan(tables, zeros, zeros, slots, PageCopies(none, none)))
        return StepPlan(
            token_ids=np.concatenate(
                [np.array(self._sequences[turn.sequence][turn.first : turn.stop]) for turn in turns]
            ),
            positions=positions,
            query_start=np.cumsum([0, *lengths]),
            seq_lens=np.array([turn.stop for turn in turns]),
            num_decodes=lengths.count(1),
            moves=(),
            groups=tuple(groups),
            first_step_slot=self.first_step_slot,
            num_sampled=np.array([turn.num_sampled for turn in turns]),
            sampling=sampling,
            token_sources=token_sources,
        )


def sampled_places(turns: list[Turn]) -> Iterator[tuple[int, int]]:
    """(sequence, position) of each token behind which one is sampled, in the order of the samples."""
    for turn in turns:
        for position in range(turn.stop - turn.num_sampled, turn.stop):
            yield turn.sequence, position
