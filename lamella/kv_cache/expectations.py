"""Which cached prefixes waiting requests count on.

The queue is known, so eviction need not guess. What a waiting request will start from is worth more than what
may never be asked for again; and of two such places the one that is needed sooner is worth more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList


@dataclass(slots=True, eq=False)
class Expectation:
    """A waiting request counts on the resume point at `node`.

    rank: requests of lower rank run sooner. Once the expectation is added, only `Expectations.rerank` changes it.
    num_tokens: tokens that the request need not compute.
    num_bytes: of the window pages kept there, and of the full pages before it that no other prefix or running request
    shares.
    is_live: False once the expectation is withdrawn, or the resume point is evicted all the same.
    """

    node: int
    rank: int
    num_tokens: int
    num_bytes: int
    is_live: bool = True


class _ExpectedNode:
    """The expectations of one node, in the order in which they came, and their ranks.

    since: a number that is smaller the longer the node has been expected."""

    __slots__ = ("expectations", "ranks", "since")

    def __init__(self, since: int) -> None:
        self.since = since
        self.expectations: OrderedDict[Expectation, None] = OrderedDict()
        self.ranks = SortedList()

    @property
    def first(self) -> Expectation:
        return next(iter(self.expectations))


class Expectations:
    """All expectations, by node.

    num_tokens and num_bytes count a node once, however many requests expect it. No call takes longer for many requests,
    but for the logarithm of a sorted list and `disappoint`, which tells all who expect a node.
    """

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
        """What the node contributes to num_bytes; 0 where nobody expects it."""
        expected = self._by_node.get(node)
        return expected.first.num_bytes if expected else 0

    def turn(self, node: int) -> tuple[int, int]:
        """Sort key of an expected node for eviction, smallest first. Smaller is the node whose soonest request will run
        later; of equals, the one that has been expected for longer."""
        expected = self._by_node[node]
        return -expected.ranks[0], expected.since

    def add(self, expectation: Expectation) -> None:
        """A waiting request counts on the expectation's node from now on."""
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
        """The resume point at `node` is gone, and so are all expectations of it."""
        self._count(node, -1)
        expected = self._by_node.pop(node, None)
        for expectation in expected.expectations if expected else ():
            expectation.is_live = False

    def _count(self, node: int, sign: int) -> None:
        """Add what the node contributes to the sums (sign 1), or take it off before that changes (sign -1)."""
        expected = self._by_node.get(node)
        if expected:
            self.num_requests += sign * len(expected.expectations)
            self.num_tokens += sign * expected.first.num_tokens
            self.num_bytes += sign * expected.first.num_bytes
