"""What metrics and the log line are made from, read from an engine's own counters when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lamella.kv_cache.counters import KVCacheCounters


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Totals since the start, and what is so now. page_bytes: of a page, per group. arena_bytes: the most that the KV
    memory lends. num_proposed_at, num_accepted_at: of drafts, by position."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_steps: int
    kv_cache: KVCacheCounters
    page_bytes: dict[str, int]
    arena_bytes: int
    num_proposed_at: tuple[int, ...]
    num_accepted_at: tuple[int, ...]

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV memory that requests hold; what is only cached does not count."""
        owned = sum(usage.owned * self.page_bytes[name] for name, usage in self.kv_cache.pages.items())
        return owned / self.arena_bytes


class SamplingLimits(Protocol):
    """What is told of a request's parameters."""

    @property
    def n(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...


class ObservedRequest(Protocol):
    """One sample of a user's request, as far as it is looked at here. Times are of `time.monotonic`."""

    @property
    def request_id(self) -> str: ...

    @property
    def sample_index(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int | None: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def first_scheduled_time(self) -> float | None: ...

    @property
    def first_token_time(self) -> float | None: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def num_preemptions(self) -> int: ...
