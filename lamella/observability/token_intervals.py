"""How long requests wait from one of their tokens to the next, noted once a step and not once a token."""

from __future__ import annotations

from lamella.observability.bucket_counts import BucketCounts
from lamella.observability.engine_snapshot import ObservedRequest

_MOST_NOTED = 1024


class TokenIntervals:
    """As long as the same requests decode, the interval is the same for all of them, and one number a step is enough.
    Requests are looked at one by one only where one came or went.

    A step that gives a request several tokens counts once, as in vLLM. A request that waited again in between, because
    it was preempted, counts with all of that time.
    """

    def __init__(self, counts: BucketCounts) -> None:
        self._counts = counts
        self._last_time: dict[ObservedRequest, float] = {}  # of those in `_together` it may be old
        self._requests: object = None  # what the last step was told, the list itself
        self._together: list[ObservedRequest] = []  # the requests in it, each once
        self._time = 0.0  # of the last step
        self._noted: list[float] = []

    def step(self, requests: list[ObservedRequest], now: float) -> None:
        """requests: those that got tokens. The same list object as in the step before says that they are the same; it
        is not changed meanwhile."""
        if requests is self._requests:
            self._noted.append(now - self._time)
            self._time = now
            if len(self._noted) == _MOST_NOTED:
                self.count()
            return
        self.settle()
        last_time = self._last_time
        self._together = list(dict.fromkeys(requests))
        for request in self._together:
            last = last_time.get(request)
            if last is not None:
                self._counts.observe(now - last)
            last_time[request] = now
        self._requests, self._time = requests, now

    def end(self, request: ObservedRequest) -> None:
        """The request gets no more tokens."""
        self.settle()
        self._last_time.pop(request, None)

    def settle(self) -> None:
        """Count what is noted, and look at requests one by one in the next step."""
        self.count()
        if self._requests is not None:
            self._last_time.update(dict.fromkeys(self._together, self._time))
        self._requests, self._together = None, []

    def count(self) -> None:
        """Count what is noted, and go on noting."""
        self._counts.observe_all(self._noted, len(self._together))
        self._noted.clear()
