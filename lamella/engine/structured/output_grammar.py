"""How far one output has come in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher


class OutputGrammar:
    """Of one sample. It is asked with the whole output so far, and finds out itself what of it is new or was taken
    back, so that it is right after a preemption, a failed step or rejected drafts.

    problem: why the output cannot go on in its grammar; None: it can.
    """

    def __init__(self, matcher: LLMatcher, num_mask_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_mask_words
        self._consumed = np.zeros(64, dtype=np.int32)  # the first `_num_consumed` of them
        self._num_consumed = 0
        self.problem: str | None = None

    def mask(self, output_ids: np.ndarray) -> np.ndarray:
        """Which tokens may come after these (int [n]): uint32 [ceil(vocab / 32)], as SamplingBatch.masks has it. None
        of them, where there is a `problem`."""
        if not self._go_to(output_ids):
            return np.zeros(self._num_words, dtype=np.uint32)
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")[: self._num_words]
        if self._matcher.is_error():
            self._give_up()
            return np.zeros(self._num_words, dtype=np.uint32)
        return mask.astype(np.uint32, copy=False)

    def num_allowed(self, output_ids: np.ndarray, next_ids: list[int]) -> int:
        """How many of `next_ids`, from the first on, may come one after the other behind the output."""
        if not next_ids or not self._go_to(output_ids):
            return 0
        return int(self._matcher.validate_tokens(next_ids))

    def _go_to(self, output_ids: np.ndarray) -> bool:
        """Bring the state to behind these tokens. False: there is none."""
        if self.problem is not None:
            return False
        num_common = min(self._num_consumed, len(output_ids))
        differs = (self._consumed[:num_common] != output_ids[:num_common]).nonzero()[0]
        if len(differs):
            num_common = int(differs[0])
        if num_common < self._num_consumed:
            self._matcher.rollback(self._num_consumed - num_common)
            self._num_consumed = num_common
        new_ids = output_ids[num_common:].tolist()
        if len(output_ids) > len(self._consumed):
            self._consumed = np.resize(self._consumed, 2 * len(output_ids))
        # Tokens behind an end token, in an output that went on, belong to no grammar.
        if new_ids and not self._matcher.consume_tokens(new_ids):
            self._give_up()
            return False
        self._consumed[num_common : len(output_ids)] = new_ids
        self._num_consumed = len(output_ids)
        return not self._matcher.is_error() or self._give_up()

    def _give_up(self) -> bool:
        self.problem = f"the output cannot go on in its grammar: {self._matcher.get_error()[:500]}"
        return False
