"""How far one output has come in its grammar."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class GrammarState(Protocol):
    """A library's state of one output."""

    def accept(self, token_ids: list[int]) -> bool:
        """Go on by these. False: they may not come, and the state is of no more use."""
        ...

    def take_back(self, num_tokens: int) -> None:
        """Go back by as many of the last accepted tokens."""
        ...

    def mask(self) -> np.ndarray | None:
        """Which tokens may come: uint32 words of at least the model's vocabulary, the token with id t being bit t % 32
        of word t // 32. None: there is an error."""
        ...

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these, from the first on, may come. The state stays."""
        ...

    def error(self) -> str: ...


class OutputGrammar:
    """Of one sample. It is asked with the whole output so far, and finds out itself what of it is new or was taken
    back, so that it is right after a preemption, a failed step or rejected drafts.

    problem: why the output cannot go on in its grammar; None: it can.
    """

    def __init__(self, state: GrammarState, num_mask_words: int) -> None:
        self._state = state
        self._num_words = num_mask_words
        self._consumed = np.zeros(64, dtype=np.int32)  # the first `_num_consumed` of them
        self._num_consumed = 0
        self.problem: str | None = None

    def mask(self, output_ids: np.ndarray) -> np.ndarray:
        """Which tokens may come after these (int [n]): uint32 [ceil(vocab / 32)], as SamplingBatch.masks has it. None
        of them, where there is a `problem`."""
        if not self._go_to(output_ids):
            return np.zeros(self._num_words, dtype=np.uint32)
        mask = self._state.mask()
        if mask is None:
            self._give_up()
            return np.zeros(self._num_words, dtype=np.uint32)
        return mask[: self._num_words]

    def num_allowed(self, output_ids: np.ndarray, next_ids: list[int]) -> int:
        """How many of `next_ids`, from the first on, may come one after the other behind the output."""
        if not next_ids or not self._go_to(output_ids):
            return 0
        return self._state.num_allowed(next_ids)

    def _go_to(self, output_ids: np.ndarray) -> bool:
        """Bring the state to behind these tokens. False: there is none."""
        if self.problem is not None:
            return False
        num_common = min(self._num_consumed, len(output_ids))
        differs = (self._consumed[:num_common] != output_ids[:num_common]).nonzero()[0]
        if len(differs):
            num_common = int(differs[0])
        if num_common < self._num_consumed:
            self._state.take_back(self._num_consumed - num_common)
            self._num_consumed = num_common
        new_ids = output_ids[num_common:].tolist()
        if len(output_ids) > len(self._consumed):
            self._consumed = np.resize(self._consumed, 2 * len(output_ids))
        # Tokens behind an end token, in an output that went on, belong to no grammar.
        if new_ids and not self._state.accept(new_ids):
            self._give_up()
            return False
        self._consumed[num_common : len(output_ids)] = new_ids
        self._num_consumed = len(output_ids)
        return True

    def _give_up(self) -> None:
        self.problem = f"the output cannot go on in its grammar: {self._state.error()}"
