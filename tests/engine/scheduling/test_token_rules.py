"""Which tokens may not come next, against transformers' processors of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lamella.engine.scheduling.token_rules import TokenRules, ends_of, repeated_ngram_ends
from lamella.model_executor.step_plan import TokenBiases

VOCAB = 6  # so few that sequences repeat


def banned_by(processor, token_ids: np.ndarray) -> set[int]:
    scores = processor(torch.from_numpy(token_ids.astype(np.int64))[None], torch.zeros(1, VOCAB))
    return set(torch.isneginf(scores[0]).nonzero().flatten().tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repeated_ngrams_end_as_in_transformers(size):
    generator = np.random.default_rng(size)
    processor = NoRepeatNGramLogitsProcessor(size)
    found = [0, 0]
    for _ in range(200):
        token_ids = generator.integers(0, VOCAB if size < 3 else 2, size=generator.integers(1, 30)).astype(np.int32)
        banned = repeated_ngram_ends(token_ids, size)
        assert set(banned) == banned_by(processor, token_ids)
        found[bool(banned)] += 1
    assert found[1] > 50
    assert size == 1 or found[0] > 10


def test_sequences_end_as_in_transformers():
    generator = np.random.default_rng(7)
    num_banned = 0
    for _ in range(200):
        lengths = generator.integers(1, 4, size=4)
        sequences = tuple({tuple(generator.integers(0, VOCAB, size=length).tolist()) for length in lengths})
        token_ids = generator.integers(0, VOCAB, size=generator.integers(3, 12)).astype(np.int32)
        banned = ends_of(sequences, token_ids)
        assert set(banned) == banned_by(NoBadWordsLogitsProcessor([list(one) for one in sequences]), token_ids)
        num_banned += len(banned)
    assert num_banned > 150


def test_a_sequence_counts_from_its_first_tokens_on():
    sequences = ((1, 2, 3),)
    assert ends_of(sequences, np.array([], dtype=np.int32)) == ()
    assert ends_of(sequences, np.array([2], dtype=np.int32)) == ()
    assert ends_of(sequences, np.array([1, 2], dtype=np.int32)) == (3,)
    assert ends_of(sequences, np.array([1, 2, 3], dtype=np.int32)) == ()


@pytest.mark.parametrize("num_output", [0, 1, 3])
def test_all_rules_together_ban_what_each_bans(num_output):
    prompt, output = [1, 4, 2, 4], [4, 2, 0][:num_output]
    token_ids = np.array(prompt + output, dtype=np.int32)
    rules = TokenRules(
        banned=(5,),
        banned_first=(3,),
        bad_words=((4, 0),),
        bad_sequences=((2, 4, 4),),
        no_repeat_ngram_size=2,
    )
    expected = banned_by(SuppressTokensLogitsProcessor([5]), token_ids)
    expected |= banned_by(SuppressTokensAtBeginLogitsProcessor([3], len(prompt)), token_ids)
    expected |= banned_by(NoBadWordsLogitsProcessor([[2, 4, 4]]), token_ids)
    expected |= banned_by(NoRepeatNGramLogitsProcessor(2), token_ids)
    expected |= {0} if output[-1:] == [4] else set()  # the prompt's 4 begins no bad word
    assert set(rules.banned_next(token_ids, len(prompt))) == expected


def test_only_what_depends_on_tokens_reads_them():
    biases = TokenBiases(np.array([1]), np.array([0.5], dtype=np.float32))
    still = [
        TokenRules(),
        TokenRules(biases=biases, allowed=np.zeros(1, dtype=np.uint32), banned=(1,), banned_first=(2,)),
        TokenRules(bad_words=((1,),), bad_sequences=((2,), (3,))),
    ]
    assert [rules.reads_tokens for rules in still] == [False, False, False]
    reading = [
        TokenRules(bad_words=((1,), (1, 2))),
        TokenRules(bad_sequences=((3, 3),)),
        TokenRules(no_repeat_ngram_size=1),
    ]
    assert [rules.reads_tokens for rules in reading] == [True, True, True]
