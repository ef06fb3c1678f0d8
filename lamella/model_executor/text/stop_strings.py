"""Where a growing text completes a stop string, and how much of its end may become one.

Every position of the text whose character some stop string begins with is a *start*. The stop strings that a start can
still become are neighbours when sorted. So a start is a range of the sorted strings, and the number of its characters
that have been compared. Few starts need looking at when text is added:

- the earliest, for it says how much must be held back. Once it can become nothing the next one is the earliest.
- one that is so long now that the shortest string of its range may be complete.

The others wait. So each character is compared only a few times, however many and however long the stop strings are;
more often only where the text really begins like them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StopStrings:
    """Stop strings prepared for look-up: nothing here changes, and any number of texts may share it.

    given: in the caller's order, without repetitions, none empty.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(given)
        self.rank = {string: order for order, string in enumerate(self.given)}
        self.sorted = sorted(self.given)
        self.lengths = [len(string) for string in self.sorted]
        self.longest = max(self.lengths)
        # Of each, the longest other one that it begins with, or -1.
        self.inner: list[int] = []
        nested: list[int] = []
        for index, string in enumerate(self.sorted):
            while nested and not string.startswith(self.sorted[nested[-1]]):
                nested.pop()
            self.inner.append(nested[-1] if nested else -1)
            nested.append(index)
        # Character -> (low, high, the least length): the strings that begin with it.
        self.beginning_with: dict[str, tuple[int, int, int]] = {}
        for index, string in enumerate(self.sorted):
            low, _, shortest = self.beginning_with.get(string[0], (index, index, len(string)))
            self.beginning_with[string[0]] = low, index + 1, min(shortest, len(string))


class Match(NamedTuple):
    """The stop string that a text completed, and where it begins."""

    position: int
    string: str


@dataclass(slots=True)
class _Start:
    """low, high: the strings it can become. num_compared: of its characters. check_at: the least length of the text
    at which one of them is complete."""

    low: int
    high: int
    num_compared: int
    check_at: int


class StopMatcher:
    """Looks for stop strings in one text, which is given piece by piece."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._num_chars = 0
        self._recent = ""  # the end of the text, long enough for every start
        self._starts: OrderedDict[int, _Start] = OrderedDict()  # by position, ascending
        # Heap of (check_at, position). Entries of starts that have changed since stay in it.
        self._to_check: list[tuple[int, int]] = []
        self._mark = self._certain_end = -1
        self._before_mark: dict[int, _Start] = {}  # starts that changed after the mark, as they were

    def feed(self, text: str) -> Match | None:
        """Add `text`. Of the stop strings that end inside it, the one that begins first; of those that begin at
        one place, the first that was given."""
        first_of = self._stops.beginning_with
        for position, character in enumerate(text, self._num_chars):
            if character in first_of:
                low, high, shortest = first_of[character]
                self._starts[position] = _Start(low, high, 0, position + shortest)
                heapq.heappush(self._to_check, (position + shortest, position))
        self._recent += text
        self._num_chars += len(text)
        found: list[Match] = []
        while self._to_check and self._to_check[0][0] <= self._num_chars:
            check_at, position = heapq.heappop(self._to_check)
            start = self._starts.get(position)
            if start is not None and start.check_at == check_at:
                found += self._compare(position, start)
        self._forget_old_text()
        return min(found, key=lambda match: (match.position, self._stops.rank[match.string]), default=None)

    def num_held_back(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        while self._starts:
            position = next(iter(self._starts))
            start = self._starts[position]
            if position + start.num_compared < self._num_chars:
                self._compare(position, start)
            if position in self._starts:
                return self._num_chars - position
        return 0

    def num_tentative(self) -> int:
        """`num_held_back`, but what might be held back after `rewind` counts as well."""
        return self.num_held_back() if self._mark < 0 else self._num_chars - self._certain_end

    def mark(self) -> None:
        """Remember this place for `rewind`."""
        self._certain_end = self._num_chars - self.num_held_back()
        self._mark = self._num_chars

    def release(self) -> None:
        """Forget the mark, if there is one."""
        self._mark = -1
        self._before_mark.clear()

    def rewind(self) -> None:
        """Take back the text that was added after the mark."""
        surplus = self._num_chars - self._mark
        if surplus:
            self._recent = self._recent[:-surplus]
        self._num_chars = self._mark
        while self._starts and next(reversed(self._starts)) >= self._mark:
            self._starts.popitem()
        if self._before_mark:
            self._starts.update(self._before_mark)
            self._starts = OrderedDict(sorted(self._starts.items()))
            for position, start in self._before_mark.items():
                heapq.heappush(self._to_check, (start.check_at, position))
        self.release()

    def _compare(self, position: int, start: _Start) -> list[Match]:
        """Narrow the start's range by the characters that it was not compared with yet, and drop it where nothing is
        left. Returns the strings that are complete."""
        if position < self._mark and position not in self._before_mark:
            self._before_mark[position] = _Start(start.low, start.high, start.num_compared, start.check_at)
        stops, known = self._stops, start.num_compared
        base = self._num_chars - len(self._recent)
        rest = self._recent[position + known - base :]
        # Sorted, strings that end within the text come first, then those that go on after it, then others.
        longer = bisect_right(
            stops.sorted, rest, start.low, start.high, key=lambda string: string[known : known + len(rest) + 1]
        )
        end = bisect_right(stops.sorted, rest, longer, start.high, key=lambda string: string[known : known + len(rest)])
        found = []
        index = longer - 1
        while index >= start.low and stops.lengths[index] > known:
            if rest.startswith(stops.sorted[index][known:]):
                found.append(Match(position, stops.sorted[index]))
            index = stops.inner[index]
        if longer == end:
            del self._starts[position]
            return found
        start.num_compared = self._num_chars - position
        if (longer, end) != (start.low, start.high):
            start.low, start.high = longer, end
            check_at = position + min(stops.lengths[longer:end])
            if check_at != start.check_at:
                start.check_at = check_at
                heapq.heappush(self._to_check, (check_at, position))
        return found

    def _forget_old_text(self) -> None:
        if self._mark < 0 and len(self._recent) > 2 * self._stops.longest + 64:
            self._recent = self._recent[-self._stops.longest :]
