"""Which of the waiting requests is next, by policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from lamella.engine.scheduling.branch_order import BranchOrder
from lamella.engine.scheduling.request import Request
from lamella.kv_cache.prefix_match import PrefixMatch

MAX_WAIT_STEPS = 2000

Match = Callable[[Request], PrefixMatch]


class ArrivalOrder:
    """First come, first served."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first."""
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request, step: int, num_cached: int) -> None:
        """step: how many steps have run when it comes. num_cached: tokens of its prompt that need not be computed
        now."""
        self._requests[request] = None

    def discard(self, request: Request) -> None:
        """The request waits no more and did not start."""
        del self._requests[request]

    def start(self, request: Request) -> None:
        """The request waits no more: its prompt is being computed."""
        del self._requests[request]

    def parting_tokens(self, request: Request) -> int:
        """How many first tokens the request's prompt has in common with the waiting one that parts from it last; 0:
        none is known."""
        return 0

    def next(self, step: int) -> tuple[Request, PrefixMatch]:
        """The request that is next, and what the cache has of its prompt. At least one must wait."""
        request = next(iter(self._requests))
        return request, self._match(request)


class PrefixOrder:
    """Visits the waiting prompts' tree branch by branch (see BranchOrder), whatever the order of arrival.

    Requests that came between the same two steps, as the prompts of one call do, are of one *age*, and their order
    among each other is free. Later requests overtake them for MAX_WAIT_STEPS at most: once the oldest age has waited
    so long, only its requests are visited until none of them waits.
    """

    def __init__(self, match: Match) -> None:
        self._match = match
        self._step_of: OrderedDict[Request, int] = OrderedDict()
        self._ages: OrderedDict[int, OrderedDict[Request, None]] = OrderedDict()  # by step, oldest first
        self._num_cached: dict[Request, int] = {}
        self._all = BranchOrder(match)
        self._overdue = BranchOrder(match)  # the oldest age, once it must not be overtaken any more
        self._overdue_step = -1

    def __len__(self) -> int:
        return len(self._step_of)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._step_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._step_of

    @property
    def has_overdue(self) -> bool:
        """Whether requests wait of an age that must not be overtaken any more, as of the last `next`."""
        return len(self._overdue) > 0

    def add(self, request: Request, step: int, num_cached: int) -> None:
        self._step_of[request] = step
        self._ages.setdefault(step, OrderedDict())[request] = None
        self._num_cached[request] = num_cached
        self._order_of(step).add(request, num_cached)

    def discard(self, request: Request) -> None:
        self._order_of(self._forget(request)).discard(request)

    def start(self, request: Request) -> None:
        self._order_of(self._forget(request)).start(request)

    def parting_tokens(self, request: Request) -> int:
        return self._order_of(self._step_of[request]).parting_tokens(request)

    def next(self, step: int) -> tuple[Request, PrefixMatch]:
        oldest = next(iter(self._ages))
        if step - oldest >= MAX_WAIT_STEPS and len(self._ages) > 1 and oldest != self._overdue_step:
            self._overdue_step = oldest
            for request in self._ages[oldest]:
                self._all.discard(request)
                self._overdue.add(request, self._num_cached[request])
        return (self._overdue if len(self._overdue) else self._all).next()

    def _order_of(self, step: int) -> BranchOrder:
        return self._overdue if step == self._overdue_step else self._all

    def _forget(self, request: Request) -> int:
        step = self._step_of.pop(request)
        del self._num_cached[request]
        of_age = self._ages[step]
        del of_age[request]
        if not of_age:
            del self._ages[step]
        return step
