"""What the scheduler has done, in numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.kv_cache.counters import HitCounters
from lamella.kv_cache.prefix_match import PrefixMatch


class DraftCounters(NamedTuple):
    """Drafts that steps have verified, and those of them that requests got, by their place behind the last token that
    was known: the first entry counts first drafts."""

    num_proposed_at: tuple[int, ...]
    num_accepted_at: tuple[int, ...]

    @classmethod
    def none(cls, most: int) -> DraftCounters:
        return cls((0,) * most, (0,) * most)

    @property
    def num_proposed(self) -> int:
        return sum(self.num_proposed_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.num_accepted_at)

    def add(self, num_proposed: np.ndarray, num_accepted: np.ndarray) -> DraftCounters:
        """One step's, int64 [n] each, n at most as long as these."""
        return DraftCounters(_sums(self.num_proposed_at, num_proposed), _sums(self.num_accepted_at, num_accepted))


def _sums(totals: tuple[int, ...], more: np.ndarray) -> tuple[int, ...]:
    return (*(total + one for total, one in zip(totals, more.tolist(), strict=False)), *totals[len(more) :])


class SchedulerCounters(NamedTuple):
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    hits: HitCounters


class AdmissionCounters(NamedTuple):
    """Totals over first admissions; resumes do not count."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    hits: HitCounters = HitCounters()

    def add(self, request: Request, match: PrefixMatch, page_tokens: int) -> AdmissionCounters:
        num_cached = match.num_tokens - match.num_skipped_tokens
        num_partial_tokens = num_cached % page_tokens
        return AdmissionCounters(
            self.num_requests + 1,
            self.num_prompt_tokens + request.num_prompt_tokens,
            self.num_cached_tokens + num_cached,
            self.hits.add(
                num_full_tokens=num_cached - num_partial_tokens,
                num_partial_tokens=num_partial_tokens,
                num_replay_tokens=match.num_replayed_tokens,
                num_skipped_tokens=match.num_skipped_tokens,
            ),
        )
