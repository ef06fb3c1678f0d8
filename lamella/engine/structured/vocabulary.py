"""A model's tokens as llguidance wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Takes seconds for a large vocabulary. vocab_size: how many logits the model has, which may be more than tokens.

    Raises RequestError where the model has no end token, with which an output that is complete could end, or its
    tokenizer is of a kind that llguidance does not read.
    """
    from llguidance import LLTokenizer

    known = [token_id for token_id in end_token_ids if token_id < vocab_size]
    if not known:
        raise RequestError("structured_outputs needs a model with an end token: without one no output can be complete")
    try:
        return LLTokenizer(tokenizer.as_json(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=known)
    except Exception as error:  # the library raises nothing more specific
        raise RequestError(f"structured_outputs cannot be used with this model's tokenizer: {error}") from error
