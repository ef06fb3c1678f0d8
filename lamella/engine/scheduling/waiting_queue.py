"""The requests that wait, and what of the cache is kept for them meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.waiting_order import MAX_WAIT_STEPS, ArrivalOrder, PrefixOrder
from lamella.errors import ConfigError
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.prefix_match import PrefixMatch

_ORDERS: dict[str, type[ArrivalOrder | PrefixOrder]] = {"fcfs": ArrivalOrder, "prefix": PrefixOrder}
SCHEDULING_POLICIES = tuple(_ORDERS)
# Ranks of preempted requests lie below those of all others, however long their prefixes.
_FIRST_RANK = -(1 << 40)


class WaitingQueue:
    """Preempted requests come first, the last preempted before the others. All others follow in the order of `policy`:

    "fcfs": the oldest is next (ArrivalOrder).
    "prefix": the one with the longest prefix in the cache is next, and then those that share most with it. So each
    prefix is computed once and used by all before it is evicted (PrefixOrder). With this policy, requests that find
    more in the cache, and requests that are overdue, come even before preempted ones. That ends once a preempted
    request has waited for MAX_WAIT_STEPS: from then on only requests run that have run before (see `preemption`).

    What the cache has of a waiting request's prompt outlasts what nobody waits for. Of two such prefixes, the one that
    is needed sooner outlasts the other.
    """

    def __init__(self, manager: BlockManager, policy: str) -> None:
        if policy not in _ORDERS:
            raise ConfigError(
                f"scheduling_policy={policy!r} is not known; choose one of {', '.join(SCHEDULING_POLICIES)}"
            )
        self._manager = manager
        self._by_prefix = policy == "prefix"
        self._preempted: OrderedDict[Request, int] = OrderedDict()  # the step since which each waits
        self._order: ArrivalOrder | PrefixOrder = _ORDERS[policy](self._match)
        self._expectations: dict[Request, Expectation] = {}
        self._first_rank, self._next_rank = _FIRST_RANK, 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._order)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        yield from self._order

    def add(self, request: Request, step: int) -> None:
        self._next_rank += 1
        self.expect(request, self._next_rank)
        expectation = self._expectations.get(request)
        num_cached = 0 if expectation is None else expectation.num_tokens
        if expectation is None and self._by_prefix:  # a prefix can be found, yet not be kept
            num_cached = self._match(request).num_tokens
        elif expectation is not None and self._by_prefix:  # the longest runs first
            self._manager.rerank(expectation, -num_cached)
        self._order.add(request, step, num_cached)

    def add_first(self, request: Request, step: int) -> None:
        """Put a preempted request at the head. The caller must call `expect_first` afterwards, not before what the
        request left in the cache is final: it may yet be rolled back."""
        self._preempted[request] = step
        self._preempted.move_to_end(request, last=False)

    def expect_first(self, request: Request) -> None:
        """`expect` for a request that `add_first` has queued, with a lower rank than all others."""
        self._first_rank -= 1
        self.expect(request, self._first_rank)

    def discard(self, request: Request) -> None:
        """Remove the request, if it waits. It did not start."""
        if request in self._preempted:
            del self._preempted[request]
        elif request in self._order:
            self._order.discard(request)
        self._withdraw(request)

    def start(self, request: Request) -> None:
        """The waiting request waits no more: its prompt is being computed."""
        if request in self._preempted:
            del self._preempted[request]
        else:
            self._order.start(request)
        self._withdraw(request)

    def next(self, step: int) -> tuple[Request, PrefixMatch]:
        """The request to start next, and what the cache has of its prompt; it stays in the queue until `start`."""
        if not self._preempted:
            return self._order.next(step)
        request = next(iter(self._preempted))
        match = self._match(request)
        longest_wait = step - self._preempted[next(reversed(self._preempted))]
        if isinstance(self._order, PrefixOrder) and len(self._order) and longest_wait < MAX_WAIT_STEPS:
            other, other_match = self._order.next(step)
            if self._order.has_overdue or other_match.num_tokens > match.num_tokens:
                return other, other_match
        return request, match

    def parting_tokens(self, request: Request) -> int:
        """How many first tokens a waiting request's prompt has in common with the waiting one that parts from it last;
        0: none is known."""
        return 0 if request in self._preempted else self._order.parting_tokens(request)

    def expect(self, request: Request, rank: int) -> None:
        """Let what the cache has of the prompt outlast what nobody waits for. rank: the lower, the sooner the request
        runs."""
        expectation = self._manager.expect(request.sought_token_ids, request.salt, rank)
        if expectation is not None:
            self._expectations[request] = expectation

    def _match(self, request: Request) -> PrefixMatch:
        sought = request.sought_token_ids
        boundaries = tuple(each for each in request.prefix_boundaries if each <= len(sought))
        return self._manager.match(sought, request.salt, boundaries)

    def _withdraw(self, request: Request) -> None:
        expectation = self._expectations.pop(request, None)
        if expectation is not None:
            self._manager.withdraw(expectation)
