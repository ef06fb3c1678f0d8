"""What a request asks of the choice of its tokens beside temperature, filters and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamella.model_executor.step_plan import TokenBiases

TokenSequences = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Made once for a request and shared by its samples.

    biases: what is added to logits. allowed: uint32 [ceil(vocab / 32)], the only tokens that may come, as in
    SamplingBatch.masks. banned: never to come; banned_first: not as the first token of the output.
    bad_words: sequences none of which may become complete in the output; bad_sequences: neither in prompt and output
    together. no_repeat_ngram_size: no sequence of so many tokens may come twice in prompt and output; 0: off.
    """

    biases: TokenBiases | None = None
    allowed: np.ndarray | None = None
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()
    bad_words: TokenSequences = ()
    bad_sequences: TokenSequences = ()
    no_repeat_ngram_size: int = 0

    @property
    def reads_tokens(self) -> bool:
        """Whether what may come next depends on which tokens came before, not just on how many."""
        sequences = (*self.bad_words, *self.bad_sequences)
        return self.no_repeat_ngram_size > 0 or any(len(sequence) > 1 for sequence in sequences)

    def banned_next(self, token_ids: np.ndarray, num_prompt_tokens: int) -> tuple[int, ...]:
        """The tokens, perhaps repeated, that may not come after these (int [n]), of which the first are the prompt."""
        banned = self.banned
        if len(token_ids) == num_prompt_tokens:
            banned += self.banned_first
        if self.bad_words:
            banned += ends_of(self.bad_words, token_ids[num_prompt_tokens:])
        if self.bad_sequences:
            banned += ends_of(self.bad_sequences, token_ids)
        if self.no_repeat_ngram_size:
            banned += repeated_ngram_ends(token_ids, self.no_repeat_ngram_size)
        return banned


def ends_of(sequences: Sequence[tuple[int, ...]], token_ids: np.ndarray) -> tuple[int, ...]:
    """The last tokens of those sequences of which all others end `token_ids` (int [n])."""
    longest = max(map(len, sequences)) - 1
    tail = tuple(token_ids[len(token_ids) - min(longest, len(token_ids)) :].tolist())
    return tuple(
        sequence[-1]
        for sequence in sequences
        if len(sequence) - 1 <= len(tail) and tail[len(tail) - len(sequence) + 1 :] == sequence[:-1]
    )


def repeated_ngram_ends(token_ids: np.ndarray, size: int) -> tuple[int, ...]:
    """The tokens that would make the last `size` of `token_ids` (int [n]) a sequence that is in it already. O(n)."""
    num_before = size - 1
    num_ngrams = len(token_ids) - num_before
    if num_ngrams < 1:
        return ()
    starts = np.arange(num_ngrams)  # of the sequences that are there
    for offset in range(num_before):
        starts = starts[token_ids[starts + offset] == token_ids[num_ngrams + offset]]
    return tuple(np.unique(token_ids[starts + num_before]).tolist())
