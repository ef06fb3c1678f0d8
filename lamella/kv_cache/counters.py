"""What the KV cache did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class GroupUsage(NamedTuple):
    """Pages of one group by state; they add up to the pages of the slabs lent to it."""

    owned: int  # private, or referenced by a request
    cached: int  # in the tree, and no request uses it now
    free: int


@dataclass(frozen=True, slots=True)
class HitCounters:
    """Prompt tokens that requests found in the cache when they first ran, by how they got them. What a preempted
    request finds when it resumes is no hit, nor is what it computes anew.

    full: shared as whole blocks. partial: a copy of the first tokens of a block that the hit ends inside of.
    replay: computed again, for their sliding KV alone: their full-attention KV was found.
    skipped: neither cached nor computed, for no later token depends on them (models with windowed layers only).
    A request that has whole blocks and a copy counts under both; tokens count once.
    """

    num_full_requests: int = 0
    num_full_tokens: int = 0
    num_partial_requests: int = 0
    num_partial_tokens: int = 0
    num_replay_requests: int = 0
    num_replay_tokens: int = 0
    num_skipped_tokens: int = 0

    def add(
        self, *, num_full_tokens: int, num_partial_tokens: int, num_replay_tokens: int, num_skipped_tokens: int = 0
    ) -> HitCounters:
        """These counts with one request more, which found so many tokens."""
        return HitCounters(
            num_full_requests=self.num_full_requests + (num_full_tokens > 0),
            num_full_tokens=self.num_full_tokens + num_full_tokens,
            num_partial_requests=self.num_partial_requests + (num_partial_tokens > 0),
            num_partial_tokens=self.num_partial_tokens + num_partial_tokens,
            num_replay_requests=self.num_replay_requests + (num_replay_tokens > 0),
            num_replay_tokens=self.num_replay_tokens + num_replay_tokens,
            num_skipped_tokens=self.num_skipped_tokens + num_skipped_tokens,
        )


@dataclass(frozen=True, slots=True)
class KVCacheCounters:
    """pages: per group, now. All others are totals since the start.

    num_slab_moves: slabs that compaction emptied for another group, by moving num_moved_pages pages.
    num_evicted_resume_points: places to resume that were given up for memory.
    num_evicted_spare_pages: sliding pages that no resume point held and that went for memory.
    num_tombstones: sliding pages that were taken from a block in the prefix tree, for whatever reason.
    num_dead_full_pages: full-attention pages that were freed because their block led to no place to resume
    any more and no request used it.
    """

    pages: dict[str, GroupUsage]
    num_slab_moves: int
    num_moved_pages: int
    num_evicted_resume_points: int
    num_evicted_spare_pages: int
    num_tombstones: int
    num_dead_full_pages: int
    hits: HitCounters


class CacheEvents(NamedTuple):
    """The same totals as plain numbers, cheap enough to read in every step; those of slides begin anew with `clear`.

    num_used, num_owned: pages of each group that are in use, and those of them that requests hold, now. num_slides:
    times that a row let go of blocks behind a window."""

    num_used: tuple[int, ...]
    num_owned: tuple[int, ...]
    num_slides: int
    num_slab_moves: int
    num_evicted_resume_points: int
    num_evicted_spare_pages: int
    num_dead_full_pages: int


class SlabUse(NamedTuple):
    """Who has which slab now. groups: int16 [num_slabs], -1 where a slab is free, -2 for the null slab. rows: int32
    [num_slabs], one of the rows that use pages of it, -1 where none does."""

    groups: np.ndarray
    rows: np.ndarray
