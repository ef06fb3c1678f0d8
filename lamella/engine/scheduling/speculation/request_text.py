"""The text of one request, with what stands behind earlier occurrences of its end: candidates for drafts."""

from __future__ import annotations

from typing import NamedTuple

from lamella.engine.scheduling.speculation.acceptance import AcceptanceRecord
from lamella.engine.scheduling.speculation.suffix_automaton import Cursor, Match, SuffixAutomaton


class Candidate(NamedTuple):
    """What may come next, token by token, and how long the match is that it was found by."""

    token_ids: list[int]
    num_matched: int


class RequestText:
    """shared: finished outputs of other requests, None: none.

    Every token that comes tells how good the last candidate was, whether it was drafted or not: `record` learns from
    that without a step being spent on it.
    """

    def __init__(self, record: AcceptanceRecord, shared: SuffixAutomaton | None) -> None:
        self.record = record
        self._text = SuffixAutomaton()
        self._shared = None if shared is None else Cursor(shared)
        self._last = Candidate([], 0)

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    def extend(self, token_ids: list[int]) -> None:
        """Append the tokens that the request got since the last call; first of all its prompt."""
        for index, (guess, token_id) in enumerate(zip(self._last.token_ids, token_ids, strict=False)):
            self.record.note(self._last.num_matched + index, is_right=guess == token_id)
            if guess != token_id:
                break
        self._last = Candidate([], 0)
        self._text.extend(token_ids)
        if self._shared is not None:
            self._shared.extend(token_ids)

    def candidate(self, most: int, least_match: int) -> Candidate:
        """Up to `most` tokens that may come next; none where no end of at least `least_match` tokens has occurred."""
        source: SuffixAutomaton | Cursor = self._text
        match = self._text.match()
        if self._shared is not None:
            other = self._shared.match()
            if other.num_tokens > match.num_tokens:
                source, match = self._shared, other
        found = [] if match.num_tokens < max(1, least_match) else self._behind(source, match, most)
        self._last = Candidate(found, match.num_tokens)
        return self._last

    @staticmethod
    def _behind(source: SuffixAutomaton | Cursor, match: Match, most: int) -> list[int]:
        return source.behind(match, most)
