"""Resume points: what each holds, and which is let go first.

First to go are those that were *passed*, and of these the one that was passed last. Then the least recently used. Then
those that are *favoured*, the least recently used first: the application said that prompts part there. At last those
that waiting requests expect, and of these the one whose request will run last.

A favour ends when it has not been of use for long: else places that no prompt comes back to would drive all others out.

Whoever evicts asks for the first of this order. Letting it go may free nothing, because running requests use all that
it holds. Then it is *set aside*: it leaves the order until that has changed, so that it is not looked at in vain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sortedcontainers import SortedList

from lamella.kv_cache.expectations import Expectation, Expectations
from lamella.kv_cache.sibling_trie import NO_NODE

Page = tuple[int, int]  # (group, node) of a windowed page
_Worth = tuple[int, int, int, int]  # (rank of its kind, ..., node); the smallest goes first
_ORDINARY, _FAVOURED, _EXPECTED = range(3)
# A favour ends when so many times as many uses have gone by as there are resume points, without one of its own.
FAVOUR_TURNS = 16
_FEWEST_POINTS = 64  # counted as if there were so many at least


class EvictionOrder:
    """A set of nodes sorted by worth."""

    def __init__(self) -> None:
        self._order = SortedList()
        self._worth: dict[int, _Worth] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._worth

    @property
    def first(self) -> int:
        """The node that is worth least; NO_NODE where there is none."""
        return self._order[0][-1] if self._order else NO_NODE

    def put(self, node: int, worth: _Worth) -> None:
        """Enter the node, or move it to where its new worth belongs."""
        before = self._worth.get(node)
        if before != worth:
            if before is not None:
                self._order.remove(before)
            self._order.add(worth)
            self._worth[node] = worth

    def discard(self, node: int) -> None:
        """Take the node out, if it is there."""
        worth = self._worth.pop(node, None)
        if worth is not None:
            self._order.remove(worth)


class ResumePoints:
    """All resume points, by the node at whose end they are. Iteration goes from the least to the most recently used.

    Apart from iteration, and the logarithm of a sorted list, costs do not grow with their number.
    """

    def __init__(self) -> None:
        self.expected = Expectations()
        self._held: dict[int, list[Page]] = {}
        self._last_use: dict[int, int] = {}
        self._latest = self._earliest = 0
        self._favoured: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._all = EvictionOrder()
        self._with_windows: EvictionOrder | None = None  # those that hold pages; None until asked for
        self._set_aside: dict[Page, set[int]] = {}  # page -> resume points set aside that hold it

    def __contains__(self, node: int) -> bool:
        return node in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held, key=self._last_use.__getitem__))

    def is_set_aside(self, node: int) -> bool:
        """Whether there is a resume point at `node` that is set aside."""
        return node in self._held and node not in self._all

    def held(self, node: int) -> list[Page]:
        """The pages that the resume point at `node` holds; none where there is no resume point."""
        return self._held.get(node, [])

    def put(self, node: int, held: list[Page]) -> None:
        """Add one at `node`, where there is none, as the most recently used."""
        assert node not in self._held
        self._held[node] = held
        self._use(node)
        self._line_up(node)

    def pop(self, node: int) -> list[Page]:
        """Forget the one at `node`, which must exist, and all expectations of it. Returns what it held."""
        self.expected.disappoint(node)
        self._favoured.pop(node, None)
        return self._take_out(node)

    def replace(self, node: int, held: list[Page]) -> list[Page]:
        """`put`, in the place of one that may be there already. Returns what that held. Expectations and favour
        stay."""
        previous = self._take_out(node) if node in self._held else []
        self.put(node, held)
        return previous

    def _take_out(self, node: int) -> list[Page]:
        held = self.strip(node)
        del self._held[node], self._last_use[node]
        self._all.discard(node)
        return held

    def strip(self, node: int) -> list[Page]:
        """The one at `node` stays, but holds nothing any more. Returns what it held."""
        held, self._held[node] = self._held[node], []
        for page in held if self._set_aside else ():
            waiting = self._set_aside.get(page)
            if waiting is not None:
                waiting.discard(node)
                if not waiting:
                    del self._set_aside[page]
        if self._with_windows is not None:
            self._with_windows.discard(node)
        return held

    # What waiting requests expect

    def expect(self, expectation: Expectation) -> None:
        """A waiting request counts on the one at the expectation's node, which must exist."""
        self.expected.add(expectation)
        self._reorder(expectation.node)

    def rerank(self, expectation: Expectation, rank: int) -> None:
        """The waiting request will run at another time than was thought."""
        self.expected.rerank(expectation, rank)
        self._reorder(expectation.node)

    def withdraw(self, expectation: Expectation) -> None:
        """The request waits no more."""
        self.expected.withdraw(expectation)
        self._reorder(expectation.node)

    # Their order

    def touch(self, node: int) -> None:
        """The one at `node`, if there is one, was used now."""
        if node in self._held:
            self._use(node)
            self._reorder(node)

    def _use(self, node: int) -> None:
        self._latest += 1
        self._last_use[node] = self._latest
        if node in self._favoured:
            self._favoured.move_to_end(node)

    def is_favoured(self, node: int) -> bool:
        """Whether the one at `node` is to outlast others."""
        return node in self._favoured

    def favour(self, node: int) -> None:
        """The one at `node`, if there is one, was used now and is to outlast others."""
        if node in self._held:
            self._favoured[node] = None
            self.touch(node)

    def _end_old_favours(self) -> None:
        most_uses = FAVOUR_TURNS * max(len(self._held), _FEWEST_POINTS)
        while self._favoured:
            node = next(iter(self._favoured))
            if self._latest - self._last_use[node] <= most_uses:
                return
            del self._favoured[node]
            self._reorder(node)

    def pass_by(self, node: int) -> None:
        """The one at `node`, if there is one, becomes the first to go, unless it is favoured or expected."""
        if node in self._held and node not in self._favoured:
            self._earliest -= 1
            self._last_use[node] = self._earliest
            self._reorder(node)

    def first(self) -> int:
        """The one to go first; NO_NODE where all are set aside or there is none. The caller may set it aside."""
        self._end_old_favours()
        return self._all.first

    def first_with_windows(self) -> int:
        """Like `first`, among those that hold any pages and whose windows are not set aside."""
        self._end_old_favours()
        if self._with_windows is None:
            self._with_windows = EvictionOrder()
            for node, held in self._held.items():
                if held:
                    self._with_windows.put(node, self._worth(node))
        return self._with_windows.first

    def set_aside(self, node: int) -> None:
        """Letting the one at `node` go would free nothing, until its node or one of its pages is noted as unused."""
        self._all.discard(node)
        self.set_windows_aside(node)

    def set_windows_aside(self, node: int) -> None:
        """All pages that the one at `node` holds are in use, until one of them is noted as unused."""
        if self._with_windows is not None:
            self._with_windows.discard(node)
        for page in self._held[node]:
            self._set_aside.setdefault(page, set()).add(node)

    def note_unused(self, node: int) -> None:
        """Nothing but its resume point keeps `node` any more: if that is set aside, it is back in the order."""
        if self.is_set_aside(node):
            self._all.put(node, self._worth(node))

    def note_unused_page(self, page: Page) -> None:
        """No request uses the page any more: resume points set aside that hold it are back in the order."""
        for node in self._set_aside.pop(page, ()):
            self._line_up(node)

    def _reorder(self, node: int) -> None:
        """What the worth of the one at `node` depends on may have changed: when it was last used, or who expects it."""
        for order in (self._all,) if self._with_windows is None else (self._all, self._with_windows):
            if node in order:
                order.put(node, self._worth(node))

    def _line_up(self, node: int) -> None:
        """Enter the one at `node` in the orders where it belongs when it is not set aside."""
        worth = self._worth(node)
        self._all.put(node, worth)
        if self._with_windows is not None and self._held[node]:
            self._with_windows.put(node, worth)

    def _worth(self, node: int) -> _Worth:
        if node in self.expected:
            return (_EXPECTED, *self.expected.turn(node), node)
        return _FAVOURED if node in self._favoured else _ORDINARY, self._last_use[node], 0, node
