"""Where in a text its own end has occurred before, in amortised constant time per token.

A suffix automaton is the smallest machine that reads exactly the substrings of a text (Blumer et al., 1985). It grows
by one token in amortised constant time, and it always knows the longest end of its text that also stands earlier. What
stood behind that place is a guess at what comes now (SAM-Decoding, arXiv 2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SEPARATOR = -1  # no token: a text that ends here does not go on in the next
_ROOT = 0
_NONE = -1


class Match(NamedTuple):
    """num_tokens: length of the longest end of a text that was found. end: the position behind the place where it was
    found. 0, 0: nothing was found."""

    num_tokens: int
    end: int


class SuffixAutomaton:
    """tokens: the text so far. A state stands for substrings that end at the same positions; of these, `_ends` keeps
    the latest known position behind them, and `_lengths` the length of the longest."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links = [_NONE]  # the state of the longest shorter ends that occur elsewhere, too
        self._lengths = [0]
        self._ends = [0]
        self._last = _ROOT  # the state of the whole text

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        following, links, lengths, ends = self._next, self._links, self._lengths, self._ends
        last, position = self._last, len(self.tokens)
        for token in tokens:
            if position:
                # What ended here occurs here, and that is the latest occurrence from which something follows.
                ends[links[last]] = position
            self.tokens.append(token)
            position += 1
            new = len(following)
            following.append({})
            lengths.append(position)
            ends.append(position)
            links.append(_ROOT)
            state = last
            while state != _NONE and token not in following[state]:
                following[state][token] = new
                state = links[state]
            if state != _NONE:
                links[new] = self._state_of(state, token)
            last = new
        self._last = last

    def _state_of(self, state: int, token: int) -> int:
        """The state whose longest substring is the longest of `state` and `token` behind it. Where the transition leads
        to one that has longer ones, it is split."""
        following, links, lengths = self._next, self._links, self._lengths
        found = following[state][token]
        if lengths[found] == lengths[state] + 1:
            return found
        clone = len(following)
        following.append(following[found].copy())
        lengths.append(lengths[state] + 1)
        self._ends.append(self._ends[found])
        links.append(links[found])
        links[found] = clone
        while state != _NONE and following[state].get(token) == found:
            following[state][token] = clone
            state = links[state]
        return clone

    def match(self) -> Match:
        """The longest end of the text that also stands earlier in it."""
        if not self.tokens:
            return Match(0, 0)
        state = self._links[self._last]
        return Match(self._lengths[state], self._ends[state]) if state != _ROOT else Match(0, 0)

    def behind(self, match: Match, most: int) -> list[int]:
        """Up to `most` tokens that stand behind a match. Where the text ends before that, what is between the match and
        the end is a period, and goes on."""
        found = self.tokens[match.end : match.end + most]
        period = len(found)
        while found and len(found) < most:
            found += found[:period]
        return found[:most]


class Cursor:
    """The longest end of one text that stands anywhere in another, which may grow meanwhile."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._state, self._num_matched = _ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text whose end is looked for."""
        automaton = self._automaton
        following, links, lengths = automaton._next, automaton._links, automaton._lengths
        state, num_matched = self._settled(), self._num_matched
        for token in tokens:
            while state != _ROOT and token not in following[state]:
                state = links[state]
                num_matched = lengths[state]
            target = following[state].get(token)
            if target is None:
                state, num_matched = _ROOT, 0
            else:
                state, num_matched = target, num_matched + 1
        self._state, self._num_matched = state, num_matched

    def match(self) -> Match:
        state = self._settled()
        return Match(self._num_matched, self._automaton._ends[state]) if self._num_matched else Match(0, 0)

    def behind(self, match: Match, most: int) -> list[int]:
        """Up to `most` tokens that stand behind a match, in the same text."""
        found = self._automaton.tokens[match.end : match.end + most]
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def _settled(self) -> int:
        """The state that the match is in. It may have been split since."""
        links, lengths = self._automaton._links, self._automaton._lengths
        while self._state != _ROOT and lengths[links[self._state]] >= self._num_matched:
            self._state = links[self._state]
        return self._state
