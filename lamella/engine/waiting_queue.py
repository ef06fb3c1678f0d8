"""Which waiting request is next."""

from __future__ import annotations

from collections.abc import Iterator

from lamella.engine.request import Request
from lamella.errors import ConfigError
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.kv_cache.expectations import Expectation

SCHEDULING_POLICIES = ("fcfs", "prefix")
MAX_RANKED_REQUESTS = 128
MAX_WAIT_STEPS = 2000


class WaitingQueue:
    """Requests in order of arrival; preempted ones come first.

    "fcfs": the oldest is next. "prefix": the one with the longest prefix in the cache is, so that what is
    cached is used before it is evicted; ties go to the oldest, and so does every choice once the oldest
    has waited MAX_WAIT_STEPS, lest it starve. Only the MAX_RANKED_REQUESTS oldest are compared.
    """

    def __init__(self, manager: HybridBlockManager, policy: str) -> None:
        if policy not in SCHEDULING_POLICIES:
            raise ConfigError(
                f"scheduling_policy={policy!r} is not known; choose one of {', '.join(SCHEDULING_POLICIES)}"
            )
        self._manager = manager
        self._by_prefix = policy == "prefix"
        self._requests: dict[Request, int] = {}  # in order; the step since which each waits
        self._expectations: dict[Request, Expectation] = {}
        self._first_rank, self._next_rank = 0, 0
        self._ranking: list[Request] = []
        self._changed = True

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request, step: int) -> None:
        self._requests[request] = step
        self._next_rank += 1
        self._changed = True
        self.expect(request, self._next_rank)

    def add_first(self, request: Request, step: int) -> None:
        """`expect` is left to the caller: what the request left behind may not be settled yet."""
        self._requests = {request: step, **self._requests}
        self._changed = True

    def expect_first(self, request: Request) -> None:
        """`expect`, for one that `add_first` took."""
        self._first_rank -= 1
        self.expect(request, self._first_rank)

    def discard(self, request: Request) -> None:
        if self._requests.pop(request, None) is not None:
            self._changed = True
        expectation = self._expectations.pop(request, None)
        if expectation is not None:
            self._manager.settle(expectation)

    def expect(self, request: Request, rank: int) -> None:
        """What the cache has of the prompt outlasts what nobody waits for. Of lower rank: runs sooner."""
        expectation = self._manager.expect(request.token_ids, request.salt, rank)
        if expectation is not None:
            if self._by_prefix:  # the longest runs first
                self._manager.rerank(expectation, -expectation.num_tokens)
            self._expectations[request] = expectation

    def new_round(self) -> None:
        """A step begins to admit. The ranking is made anew only where requests came or went: the cache
        changes little between."""
        if self._by_prefix and self._changed:
            oldest = list(self._requests)[:MAX_RANKED_REQUESTS]
            lengths = {request: self._manager.match(request.token_ids, request.salt).num_tokens for request in oldest}
            best_first = sorted(oldest, key=lambda request: -lengths[request])  # of equals the oldest
            self._ranking = best_first[::-1]
            self._changed = False

    def next(self, step: int) -> Request:
        """The request to admit next; it stays in the queue until `discard`."""
        oldest, since = next(iter(self._requests.items()))
        if not self._by_prefix or step - since >= MAX_WAIT_STEPS:
            return oldest
        while self._ranking and self._ranking[-1] not in self._requests:
            self._ranking.pop()
        return self._ranking[-1] if self._ranking else oldest
