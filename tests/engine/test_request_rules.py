"""From parameters to the rules of a request, for one tokenizer and vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from lamella import RequestError, SamplingParams
from lamella.engine.request_rules import RuleMaker, make_prompt_scores, token_mask
from tests.helpers.tiny_tokenizers import byte_level


class Tokenizer:
    """Byte-level, in which " the" is a token and "the" another."""

    def __init__(self) -> None:
        self.tokenizer = byte_level()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


@pytest.fixture
def maker() -> RuleMaker:
    return RuleMaker(Tokenizer(), vocab_size=300, end_token_ids=[9, 7])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
def test_a_mask_has_a_bit_for_each_token(vocab_size: int) -> None:
    allowed = set(np.random.default_rng(vocab_size).integers(0, vocab_size, size=40).tolist())
    mask = token_mask(allowed, vocab_size)
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-vocab_size // 32),))
    bits = {token for token in range(32 * len(mask)) if int(mask[token // 32]) >> token % 32 & 1}
    assert bits == allowed


def test_words_are_tokens_with_and_without_a_space_before(maker: RuleMaker) -> None:
    encode = Tokenizer().encode
    rules = maker.make(SamplingParams(bad_words=["the", " stop", "xy"]))
    expected = [encode(text) for text in ("the", " the", "stop", " stop", "xy", " xy")]
    assert [list(sequence) for sequence in rules.bad_words] == expected
    assert [len(sequence) for sequence in expected] == [1, 1, 1, 2, 2, 3]
    assert rules.reads_tokens


def test_an_end_token_alone_is_no_bad_sequence(maker: RuleMaker) -> None:
    rules = maker.make(SamplingParams(bad_words_ids=[[9], [5, 9], [7], [8]]))
    assert rules.bad_sequences == ((5, 9), (8,))


def test_what_asks_for_nothing_makes_no_rules(maker: RuleMaker) -> None:
    assert maker.make(SamplingParams(temperature=0.3, repetition_penalty=1.1, min_tokens=2, stop_token_ids=[4])) is None
    with pytest.raises(RequestError, match=r"stop_token_ids has 300: must lie in \[0, 299\]"):
        maker.make(SamplingParams(stop_token_ids=[300]))


def test_rules_are_made_once_for_parameters_that_come_again(maker: RuleMaker) -> None:
    params, other = SamplingParams(suppress_tokens=[1]), SamplingParams(suppress_tokens=[2])
    first = maker.make(params)
    assert maker.make(params) is first
    assert maker.make(other).banned == (2,)
    assert maker.make(params).banned == (1,)


def test_the_tokens_of_a_word_must_be_the_models(maker: RuleMaker) -> None:
    small = RuleMaker(Tokenizer(), vocab_size=256, end_token_ids=[])
    with pytest.raises(RequestError, match=r"bad_words has 'the', whose tokens \[257\] are not in the model's"):
        small.make(SamplingParams(bad_words=["the"]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"prompt_logprobs": 0}, (0, 1)),
        ({"prompt_logprobs": -1, "prompt_logprob_start": 5}, (300, 5)),
    ],
)
def test_scores_of_a_prompt_begin_behind_its_first_token(arguments: dict, expected: tuple | None) -> None:
    scores = make_prompt_scores(SamplingParams(**arguments), 9, 300)
    assert (scores if scores is None else (scores.num_logprobs, scores.start)) == expected
