"""Which cached prefixes waiting requests count on.

The queue is known, so eviction need not guess: what a waiting request will start from is worth more than what
may never be asked for again, and of two that are asked for, the one that is needed sooner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList


@dataclass(slots=True, eq=False)
class Expectation:
    """A waiting request counts on the resume point at `node`. rank: requests of lower rank run sooner; once it is
    added, only `Expectations.rerank` changes it.

    num_tokens: what it need not compute. num_bytes: pages that are cached for it and its like alone.
    is_live turns False when the resume point is evicted all the same.
    """

    node: int
    rank: int
    num_tokens: int
    num_bytes: int
    is_live: bool = True


class _ExpectedNode:
    """Who expects it, in the order of their coming, and their ranks. since: less where it is expected for longer."""

    __slots__ = ("expectations", "ranks", "since")

    def __init__(self, since: int) -> None:
        self.since = since
        self.expectations: OrderedDict[Expectation, None] = OrderedDict()
        self.ranks = SortedList()

    @property
    def first(self) -> Expectation:
        return next(iter(self.expectations))


class Expectations:
    """By node. Sums count a node once, however many requests expect it. Costs do not grow with their number."""

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = self.num_bytes = 0
        self._by_node: dict[int, _ExpectedNode] = {}
        self._num_added = 0

    def __contains__(self, node: int) -> bool:
        return node in self._by_node

    def __len__(self) -> int:
        """Number of nodes that are expected."""
        return len(self._by_node)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_node)

    def num_bytes_at(self, node: int) -> int:
        expected = self._by_node.get(node)
        return expected.first.num_bytes if expected else 0

    def turn(self, node: int) -> tuple[int, int]:
        """Of two expected nodes the one with the smaller turn can be done without sooner: the soonest of those who
        expect it will run later, or as late, and it was expected before."""
        expected = self._by_node[node]
        return -expected.ranks[0], expected.since

    def add(self, expectation: Expectation) -> None:
        expected = self._by_node.get(expectation.node)
        if expected is None:
            self._num_added += 1
            expected = self._by_node[expectation.node] = _ExpectedNode(self._num_added)
            self.num_tokens += expectation.num_tokens
            self.num_bytes += expectation.num_bytes
        expected.expectations[expectation] = None
        expected.ranks.add(expectation.rank)
        self.num_requests += 1

    def rerank(self, expectation: Expectation, rank: int) -> None:
        """The request will run at another time than was thought."""
        if expectation.is_live:
            ranks = self._by_node[expectation.node].ranks
            ranks.remove(expectation.rank)
            ranks.add(rank)
        expectation.rank = rank

    def withdraw(self, expectation: Expectation) -> None:
        """The request waits no more."""
        if not expectation.is_live:
            return
        expectation.is_live = False
        node = expectation.node
        self._count(node, -1)
        expected = self._by_node[node]
        del expected.expectations[expectation]
        expected.ranks.remove(expectation.rank)
        if not expected.expectations:
            del self._by_node[node]
        self._count(node, +1)

    def disappoint(self, node: int) -> None:
        """The resume point at `node` is gone."""
        self._count(node, -1)
        expected = self._by_node.pop(node, None)
        for expectation in expected.expectations if expected else ():
            expectation.is_live = False

    def _count(self, node: int, sign: int) -> None:
        expected = self._by_node.get(node)
        if expected:
            self.num_requests += sign * len(expected.expectations)
            self.num_tokens += sign * expected.first.num_tokens
            self.num_bytes += sign * expected.first.num_bytes
