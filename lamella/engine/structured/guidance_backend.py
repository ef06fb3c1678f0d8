"""llguidance as the library that parses grammars and computes masks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lamella.engine.structured.grammar_text import grammar_text
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.structured.vocabulary import grammar_vocabulary
from lamella.model_executor.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GuidanceBackend:
    """See GrammarBackend."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def prepare(self) -> None:
        self._vocabulary_now()

    def compile(self, params: StructuredOutputsParams) -> Callable[[], GuidanceState]:
        from llguidance import LLMatcher, LLParserLimits

        text = grammar_text(params, self._tokenizer.all_special_tokens)
        # Texts of errors go to whoever gave the grammar, and not to the log.
        matcher = LLMatcher(self._vocabulary_now(), text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:500])
        return lambda: GuidanceState(matcher.deep_copy())

    def _vocabulary_now(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size, self._end_token_ids)
            return self._vocabulary


class GuidanceState:
    """See GrammarState."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: list[int]) -> bool:
        return self._matcher.consume_tokens(token_ids) and not self._matcher.is_error()

    def take_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def mask(self) -> np.ndarray | None:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
        return None if self._matcher.is_error() else mask.astype(np.uint32, copy=False)

    def num_allowed(self, token_ids: list[int]) -> int:
        return int(self._matcher.validate_tokens(token_ids))

    def error(self) -> str:
        return self._matcher.get_error()[:500]
