"""When a text becomes a long one, and what it shares from then on."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.scheduling.long_texts import LongTexts
from lamella.engine.scheduling.request_rows import RequestRows
from tests.helpers.made_requests import make_request


def request_of(num_tokens: int, salt: str | None = None):
    request = make_request("one", range(num_tokens))
    request.salt = salt
    return request


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_text_is_long_from_the_first_token_beyond_the_length(salt):
    texts = LongTexts(8)
    short, long = request_of(8, salt), request_of(9, salt)
    for request in (short, long):
        texts.mark(request)
    assert (short.is_long, long.is_long) == (False, True)
    assert short.salt == salt
    assert long.salt != salt
    before = long.salt
    texts.mark(long)
    assert long.salt == before, "it is marked once"


def test_long_texts_share_with_those_of_their_salt_alone():
    texts = LongTexts(8)
    requests = [request_of(9, salt) for salt in (None, None, "a", "b")]
    for request in requests:
        texts.mark(request)
    salts = [request.salt for request in requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3


def test_rows_that_outgrow_the_length():
    rows = RequestRows(3, 64)
    texts = LongTexts(8)
    for num_tokens in (8, 7, 20):
        request = request_of(num_tokens)
        texts.mark(request)
        rows.put(request, 0)
    assert texts.outgrown(rows, [0, 1, 2], np.array([8, 7, 20])) == []
    assert texts.outgrown(rows, [0, 1, 2], np.array([9, 8, 21])) == [0]
    assert texts.flags(rows, np.array([1, 2])).tolist() == [False, True]
    assert texts.flags(rows, np.array([1])) is None


def test_drafts_of_a_short_text_stay_within_the_length():
    rows, texts = RequestRows(2, 64), LongTexts(8)
    for num_tokens in (7, 20):
        request = request_of(num_tokens)
        texts.mark(request)
        rows.put(request, 0)
    assert texts.num_short_tokens(rows, 0) == 8
    assert texts.num_short_tokens(rows, 1) is None
    assert LongTexts(None).num_short_tokens(rows, 0) is None


def test_models_with_one_embedding_have_no_long_texts():
    texts = LongTexts(None)
    request = request_of(10_000)
    texts.mark(request)
    assert (request.is_long, request.salt) == (False, None)
    rows = RequestRows(1, 64)
    assert texts.outgrown(rows, [0], np.array([50])) == []
    assert texts.flags(rows, np.array([0])) is None
