"""What the scheduler has done, in numbers."""

from __future__ import annotations

from typing import NamedTuple

from lamella.engine.scheduling.request import Request
from lamella.kv_cache.counters import HitCounters
from lamella.kv_cache.prefix_match import PrefixMatch


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
