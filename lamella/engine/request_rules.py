"""From SamplingParams to what scheduling reads: words become tokens, ids are checked against the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.prompt_scores import PromptScores
from lamella.engine.scheduling.token_rules import TokenRules, TokenSequences
from lamella.errors import RequestError
from lamella.model_executor.step_plan import TokenBiases
from lamella.model_executor.text.tokenizer import Tokenizer


class RuleMaker:
    """Makes the rules of requests to one model. Often one SamplingParams is the parameters of many prompts, so the last
    rules that were made are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._last: tuple[SamplingParams, TokenRules | None] | None = None

    def make(self, params: SamplingParams) -> TokenRules | None:
        """See make_token_rules."""
        last = self._last
        if last is None or last[0] is not params:
            rules = make_token_rules(params, self._tokenizer, self._vocab_size, self._end_token_ids)
            last = self._last = params, rules
        return last[1]


def make_prompt_scores(params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> PromptScores | None:
    """None where the parameters ask for no log-probabilities of the prompt."""
    if params.prompt_logprobs is None:
        return None
    num_logprobs = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
    return PromptScores(num_logprobs, max(params.prompt_logprob_start or 0, 1), num_prompt_tokens)


def make_token_rules(
    params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Iterable[int]
) -> TokenRules | None:
    """None where the parameters ask for nothing of the kind. Raises RequestError for a token that the vocabulary has
    not. end_token_ids: the model's; as in transformers, one of them alone in bad_words_ids does not count."""
    _check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    if not params.has_token_rules:
        return None
    ends = {(token_id,) for token_id in end_token_ids}
    bad_sequences = tuple(sequence for sequence in map(tuple, params.bad_words_ids) if sequence not in ends)
    biases = dict(params.logit_bias)
    for name, of_vocabulary in (
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("suppress_tokens", params.suppress_tokens),
        ("begin_suppress_tokens", params.begin_suppress_tokens),
        ("logit_bias", biases),
        ("bad_words_ids", [token_id for sequence in params.bad_words_ids for token_id in sequence]),
    ):
        _check_vocabulary(name, of_vocabulary, vocab_size)
    ids, values = np.array([*biases], dtype=np.int64), np.array([*biases.values()], dtype=np.float32)
    return TokenRules(
        biases=TokenBiases(ids, values) if biases else None,
        allowed=None if params.allowed_token_ids is None else token_mask(params.allowed_token_ids, vocab_size),
        banned=tuple(params.suppress_tokens),
        banned_first=tuple(params.begin_suppress_tokens),
        bad_words=_word_sequences(params.bad_words, tokenizer, vocab_size),
        bad_sequences=bad_sequences,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
    )


def token_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32, from the lowest, is set for each token id t."""
    is_in = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    is_in[list(token_ids)] = True
    return np.packbits(is_in, bitorder="little").view("<u4").astype(np.uint32)


def _word_sequences(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> TokenSequences:
    """The tokens of each word, at the beginning of a text and after a space, where these differ."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequence = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not sequence or max(sequence) >= vocab_size:
                raise RequestError(
                    f"bad_words has {word!r}, whose tokens {list(sequence)} are not in the model's vocabulary of "
                    f"{vocab_size}; leave it out"
                )
            sequences[sequence] = None
    return tuple(sequences)


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} has {token_id}: must lie in [0, {vocab_size - 1}], the vocabulary")
