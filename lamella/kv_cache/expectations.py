"""Which cached prefixes waiting requests count on.

The queue is known, so eviction need not guess: what a waiting request will start from is worth more than what
may never be asked for again, and of two that are asked for, the one that is needed sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Expectation:
    """A waiting request counts on the resume point at `node`. rank: requests of lower rank run sooner.

    num_tokens: what it need not compute. num_bytes: pages that are cached for it and its like alone.
    is_live turns False when the resume point is evicted all the same.
    """

    node: int
    rank: int
    num_tokens: int
    num_bytes: int
    is_live: bool = True


class Expectations:
    """By node. Sums count a node once, however many requests expect it."""

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = self.num_bytes = 0
        self._by_node: dict[int, list[Expectation]] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._by_node

    def __len__(self) -> int:
        """Number of nodes that are expected."""
        return len(self._by_node)

    def num_bytes_at(self, node: int) -> int:
        expectations = self._by_node.get(node)
        return expectations[0].num_bytes if expectations else 0

    def last_to_run(self) -> Iterator[int]:
        """The expected nodes, those that are needed last first."""
        return iter(sorted(self._by_node, key=lambda node: -min(one.rank for one in self._by_node[node])))

    def add(self, expectation: Expectation) -> None:
        self._count(expectation.node, -1)
        self._by_node.setdefault(expectation.node, []).append(expectation)
        self._count(expectation.node, +1)

    def settle(self, expectation: Expectation) -> None:
        """The request waits no more."""
        if expectation.is_live:
            expectation.is_live = False
            self._count(expectation.node, -1)
            self._by_node[expectation.node].remove(expectation)
            self._count(expectation.node, +1)
            if not self._by_node[expectation.node]:
                del self._by_node[expectation.node]

    def disappoint(self, node: int) -> None:
        """The resume point at `node` is gone."""
        self._count(node, -1)
        for expectation in self._by_node.pop(node, ()):
            expectation.is_live = False

    def _count(self, node: int, sign: int) -> None:
        expectations = self._by_node.get(node)
        if expectations:
            self.num_requests += sign * len(expectations)
            self.num_tokens += sign * expectations[0].num_tokens
            self.num_bytes += sign * expectations[0].num_bytes
