"""Elastic memory against everything else: figures over all cells, and the worst of them.

Compared is prefill_tokens_computed, the work that a cache is there to save. A system that refuses a cell has no figure
there: it is compared over the cells that both ran, and its refusals are counted beside the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kv_replay.results import Measurements, Place, Refusal, Result

OURS = "lamella"
Variant: TypeAlias = tuple[str, int | None]  # policy and interval
Outcomes: TypeAlias = dict[Place, Measurements | Refusal]


class Mean(NamedTuple):
    """A system over all cells. ratio: geometric mean of its prefill tokens / lamella's, over the num_both cells that
    both ran; None where there is none. Above 1, lamella computed less."""

    system: str
    num_both: int
    ratio: float | None
    refused: tuple[Place, ...]
    only_system: tuple[Place, ...]  # lamella refused these


class Gap(NamedTuple):
    """A cell against the best fixed ratio there. share: (lamella's prefill tokens - the ratio's) / prompt tokens;
    None where lamella refused."""

    place: Place
    best_system: str
    best_tokens: int
    tokens: int | None
    share: float | None


class VllmCell(NamedTuple):
    """A cell against the best that vLLM does there: each figure that of whichever of its settings does best in it.
    window_held: windowed_held_over_ideal; None where it is not known, as without windows."""

    place: Place
    hit_share: float
    best_hit_share: float
    mean_running: float
    best_mean_running: float
    steps: int
    best_steps: int
    window_held: float | None
    best_window_held: float | None


class Comparison(NamedTuple):
    """All cells of lamella with one policy and interval."""

    variant: Variant
    means: list[Mean]
    gaps: list[Gap]  # empty without fixed ratios
    vllm_cells: list[VllmCell]  # that both ran

    @property
    def worst_gap(self) -> Gap | None:
        """A cell that lamella refused is worse than any other."""
        return max(self.gaps, key=lambda gap: float("inf") if gap.share is None else gap.share, default=None)


def compare(results: Sequence[Result]) -> list[Comparison]:
    """One per policy and interval of lamella's results, in their order; empty without lamella, or without others."""
    by_variant: dict[Variant, dict[str, Outcomes]] = {}
    vllm: dict[str, Outcomes] = {}
    for result in results:
        cell = result.cell
        if cell.interval_tokens is None:  # vLLM has its own, and is compared with each of ours
            systems = vllm
        else:
            systems = by_variant.setdefault((cell.policy, cell.interval_tokens), {})
        if isinstance(result.outcome, Measurements | Refusal):
            systems.setdefault(cell.system, {})[cell.place] = result.outcome
    comparisons = []
    for variant, systems in by_variant.items():
        ours = systems.get(OURS)
        others = {name: outcomes for name, outcomes in {**systems, **vllm}.items() if name != OURS}
        if ours and others:
            means = [_mean(name, outcomes, ours) for name, outcomes in others.items()]
            ratios = {name: outcomes for name, outcomes in others.items() if name.startswith("split:")}
            comparisons.append(Comparison(variant, means, _gaps(ratios, ours), _vllm_cells(vllm, ours)))
    return comparisons


def _mean(system: str, outcomes: Outcomes, ours: Outcomes) -> Mean:
    theirs, own = _ran(outcomes), _ran(ours)
    both = [place for place in own if place in theirs]
    ratio = None
    if both:
        ratio = statistics.geometric_mean(
            theirs[place].prefill_tokens_computed / own[place].prefill_tokens_computed for place in both
        )
    return Mean(
        system=system,
        num_both=len(both),
        ratio=ratio,
        refused=tuple(place for place in outcomes if place not in theirs),
        only_system=tuple(place for place in theirs if place in ours and place not in own),
    )


def _gaps(ratios: dict[str, Outcomes], ours: Outcomes) -> list[Gap]:
    """Of the cells that at least one ratio ran."""
    gaps = []
    for place, outcome in ours.items():
        ran = {name: _ran(outcomes)[place] for name, outcomes in ratios.items() if place in _ran(outcomes)}
        if not ran:
            continue
        best = min(ran, key=lambda name: ran[name].prefill_tokens_computed)
        best_tokens = ran[best].prefill_tokens_computed
        if isinstance(outcome, Refusal):
            gaps.append(Gap(place, best, best_tokens, None, None))
        else:
            tokens = outcome.prefill_tokens_computed
            gaps.append(Gap(place, best, best_tokens, tokens, (tokens - best_tokens) / outcome.num_prompt_tokens))
    return gaps


def _vllm_cells(vllm: dict[str, Outcomes], ours: Outcomes) -> list[VllmCell]:
    cells = []
    for place, own in _ran(ours).items():
        settings = [_ran(outcomes)[place] for outcomes in vllm.values() if place in _ran(outcomes)]
        if settings:
            held = [one.windowed_held_over_ideal for one in settings if one.windowed_held_over_ideal is not None]
            cells.append(
                VllmCell(
                    place=place,
                    hit_share=own.hit_share,
                    best_hit_share=max(one.hit_share for one in settings),
                    mean_running=own.mean_running,
                    best_mean_running=max(one.mean_running for one in settings),
                    steps=own.steps,
                    best_steps=min(one.steps for one in settings),
                    window_held=own.windowed_held_over_ideal,
                    best_window_held=min(held, default=None),
                )
            )
    return cells


def _ran(outcomes: Outcomes) -> dict[Place, Measurements]:
    return {place: outcome for place, outcome in outcomes.items() if isinstance(outcome, Measurements)}
