"""Resume points: what each holds, and which is let go first.

Worth least are those that were passed, the last one passed first; then the least recently used; then those that
waiting requests expect, the one whose request will run last before all others.

Whoever evicts looks at the first and finds at times that letting it go would free nothing: running requests use what
it holds. Then it is *set aside* until that has changed, so that nobody looks at it again in vain.
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

from lamella.kv_cache.expectations import Expectation, Expectations
from lamella.kv_cache.sibling_trie import NO_NODE

Page = tuple[int, int]  # (group, node) of a windowed page
_Worth = tuple[bool, int, int, int]  # (is expected, ...): the less, the sooner it goes


class EvictionOrder:
    """Nodes by worth."""

    def __init__(self) -> None:
        self._order = SortedList()
        self._worth: dict[int, _Worth] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._worth

    @property
    def first(self) -> int:
        """What is worth least, or NO_NODE."""
        return self._order[0][-1] if self._order else NO_NODE

    def put(self, node: int, worth: _Worth) -> None:
        before = self._worth.get(node)
        if before != worth:
            if before is not None:
                self._order.remove(before)
            self._order.add(worth)
            self._worth[node] = worth

    def discard(self, node: int) -> None:
        worth = self._worth.pop(node, None)
        if worth is not None:
            self._order.remove(worth)


class ResumePoints:
    """By the node they end at. Costs do not grow with their number, but for iteration: least recently used first."""

    def __init__(self) -> None:
        self.expected = Expectations()
        self._held: dict[int, list[Page]] = {}
        self._last_use: dict[int, int] = {}
        self._latest = self._earliest = 0
        self._all = EvictionOrder()
        self._with_windows: EvictionOrder | None = None  # whose windows may be let go alone; once that was asked for
        self._set_aside: dict[Page, set[int]] = {}  # those that wait for a page that they hold to be used no more

    def __contains__(self, node: int) -> bool:
        return node in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._held, key=self._last_use.__getitem__))

    def is_set_aside(self, node: int) -> bool:
        return node in self._held and node not in self._all

    def held(self, node: int) -> list[Page]:
        """What the resume point at `node` holds; nothing where there is none."""
        return self._held.get(node, [])

    def put(self, node: int, held: list[Page]) -> None:
        """A new one, the most recently used."""
        assert node not in self._held
        self._held[node] = held
        self._latest += 1
        self._last_use[node] = self._latest
        self._line_up(node)

    def pop(self, node: int) -> list[Page]:
        """Forget the one at `node`, which there is, for good; what it held."""
        self.expected.disappoint(node)
        return self._take_out(node)

    def replace(self, node: int, held: list[Page]) -> list[Page]:
        """`put`, where there may be one already: what that held."""
        previous = self._take_out(node) if node in self._held else []
        self.put(node, held)
        return previous

    def _take_out(self, node: int) -> list[Page]:
        held = self.strip(node)
        del self._held[node], self._last_use[node]
        self._all.discard(node)
        return held

    def strip(self, node: int) -> list[Page]:
        """The one at `node` holds nothing any more; what it held."""
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
        """A waiting request counts on the one at the expectation's node, which there is."""
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
            self._latest += 1
            self._last_use[node] = self._latest
            self._reorder(node)

    def pass_by(self, node: int) -> None:
        """The one at `node`, if there is one, is the first to go."""
        if node in self._held:
            self._earliest -= 1
            self._last_use[node] = self._earliest
            self._reorder(node)

    def first(self) -> int:
        """The one to go first, or NO_NODE; it may be set aside."""
        return self._all.first

    def first_with_windows(self) -> int:
        """`first` of those that hold any pages."""
        if self._with_windows is None:
            self._with_windows = EvictionOrder()
            for node, held in self._held.items():
                if held:
                    self._with_windows.put(node, self._worth(node))
        return self._with_windows.first

    def set_aside(self, node: int) -> None:
        """Nothing would be free without the one at `node` before it or one of its pages is `unused`."""
        self._all.discard(node)
        self.set_windows_aside(node)

    def set_windows_aside(self, node: int) -> None:
        """All that the one at `node` holds is in use, until one of its pages is `unused`."""
        if self._with_windows is not None:
            self._with_windows.discard(node)
        for page in self._held[node]:
            self._set_aside.setdefault(page, set()).add(node)

    def note_unused(self, node: int) -> None:
        """Nothing but a resume point keeps `node` any more."""
        if self.is_set_aside(node):
            self._all.put(node, self._worth(node))

    def note_unused_page(self, page: Page) -> None:
        """No request uses the page any more."""
        for node in self._set_aside.pop(page, ()):
            self._line_up(node)

    def _reorder(self, node: int) -> None:
        """When it was used last, whether it is expected, or when it is needed, may have changed."""
        for order in (self._all,) if self._with_windows is None else (self._all, self._with_windows):
            if node in order:
                order.put(node, self._worth(node))

    def _line_up(self, node: int) -> None:
        worth = self._worth(node)
        self._all.put(node, worth)
        if self._with_windows is not None and self._held[node]:
            self._with_windows.put(node, worth)

    def _worth(self, node: int) -> _Worth:
        if node in self.expected:
            return (True, *self.expected.turn(node), node)
        return False, self._last_use[node], 0, node
