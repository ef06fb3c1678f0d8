"""Finished outputs that later requests draft from, each salt's apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from lamella.engine.scheduling.speculation.suffix_automaton import SEPARATOR, SuffixAutomaton

# An automaton takes about 400 bytes a token.
MOST_TOKENS = 1 << 18


class SharedOutputs:
    """most_outputs: of each salt; one more, and it begins anew. All salts together have at most MOST_TOKENS, those used
    longest ago go first. A request that drafts from what was let go keeps it until it ends."""

    def __init__(self, most_outputs: int, most_tokens: int = MOST_TOKENS) -> None:
        self._most_outputs, self._most_tokens = most_outputs, most_tokens
        self._automata: OrderedDict[Hashable, SuffixAutomaton] = OrderedDict()
        self._num_outputs: dict[Hashable, int] = {}

    def of(self, salt: Hashable) -> SuffixAutomaton | None:
        """What requests of this salt draft from; None: nothing is shared."""
        if not self._most_outputs:
            return None
        if salt not in self._automata:
            self._automata[salt], self._num_outputs[salt] = SuffixAutomaton(), 0
        self._automata.move_to_end(salt)
        return self._automata[salt]

    def add(self, salt: Hashable, token_ids: list[int]) -> None:
        """A request of this salt has ended with this output."""
        if not self._most_outputs or not 0 < len(token_ids) < self._most_tokens:
            return
        if self._num_outputs.get(salt, 0) >= self._most_outputs:
            self._drop(salt)
        num_tokens = sum(map(len, self._automata.values()))
        while self._automata and num_tokens + len(token_ids) + 1 > self._most_tokens:
            oldest = next(iter(self._automata))
            num_tokens -= len(self._automata[oldest])
            self._drop(oldest)
        automaton = self.of(salt)
        assert automaton is not None
        automaton.extend([*token_ids, SEPARATOR])
        self._num_outputs[salt] += 1

    def _drop(self, salt: Hashable) -> None:
        del self._automata[salt], self._num_outputs[salt]
