"""What a row enters among a step's edits, by the tokens before each of its samples."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.row_rules import RowRules, SampleEdits, row_rules
from lamella.engine.scheduling.token_rules import TokenRules
from lamella.model_executor.step_plan import TokenBiases
from tests.helpers.made_requests import make_request

BIASES = TokenBiases(np.array([3, 9]), np.array([1.5, -2.0], dtype=np.float32))
ALLOWED = np.array([0b1011], dtype=np.uint32)


def keep(prompt, output, logits):
    return logits


def ruled(name, prompt, rules=None, functions=(), **params):
    request = make_request(name, prompt, **params)
    request.rules, request.logits_functions = rules, functions
    return request


def test_a_request_that_asks_for_nothing_has_no_rules():
    assert row_rules(make_request("plain", [1, 2], temperature=0.5, top_k=3, min_tokens=2)) is None


def test_each_rule_becomes_an_edit_of_its_sample():
    rules = TokenRules(biases=BIASES, allowed=ALLOWED, banned=(7,), banned_first=(8,), no_repeat_ngram_size=2)
    row = RowRules(ruled("a", [1, 2], rules, (keep,), presence_penalty=0.5))
    edits = SampleEdits({4: (0,)})
    tokens = np.array([1, 2, 1, 5], dtype=np.int32)
    row.add_to(edits, 4, tokens[:2], 2)
    row.add_to(edits, 5, tokens[:3], 2)
    assert edits.banned_token_ids == {4: (0, 7, 8), 5: (7, 2)}
    assert edits.biases == {4: BIASES, 5: BIASES}
    assert edits.masks.keys() == {4, 5}
    assert edits.masks[4] is edits.masks[5] is ALLOWED
    assert [edits.penalties[index].token_ids.tolist() for index in (4, 5)] == [[], [1]]
    assert [edits.processors[index].functions for index in (4, 5)] == [(keep,), (keep,)]
    assert [edits.processors[index].prompt_token_ids for index in (4, 5)] == [(1, 2), (1, 2)]
    assert [edits.processors[index].output_token_ids for index in (4, 5)] == [(), (1,)]


def test_rows_say_whether_some_row_reads_tokens():
    rows = RequestRows(4, 20)
    rows.put(ruled("still", [1, 2], TokenRules(biases=BIASES, allowed=ALLOWED, banned=(7,))), 0)
    assert not rows.reads_tokens
    for reading in (
        ruled("ngrams", [1, 2], TokenRules(no_repeat_ngram_size=3)),
        ruled("words", [1, 2], TokenRules(bad_words=((1, 2),))),
        ruled("functions", [1, 2], None, (keep,)),
        ruled("penalties", [1, 2], None, repetition_penalty=1.5),
    ):
        row = rows.put(reading, 0)
        assert rows.reads_tokens
        rows.take(row)
        assert not rows.reads_tokens


def test_a_batch_has_the_edits_of_its_rows_alone_and_of_their_tokens_now():
    rows = RequestRows(4, 20)
    rows.put(make_request("plain", [1, 2, 3]), 0)
    row = rows.put(ruled("words", [4, 5], TokenRules(bad_words=((6, 7), (8,)), biases=BIASES)), 0)
    both = np.array([0, row])
    assert rows.sampling_batch(both).banned_token_ids == {1: (8,)}
    rows.tokens[row, 2] = 6
    rows.num_tokens[row] = 3
    batch = rows.sampling_batch(both)
    assert batch.banned_token_ids in ({1: (7, 8)}, {1: (8, 7)})
    assert batch.biases == {1: BIASES}
    assert batch.edited_rows == [1]
    plain = rows.sampling_batch(np.array([0]))
    assert plain.edited_rows == []
    assert (plain.masks, plain.processors, plain.penalties) == ({}, {}, {})
    # Resumed in another row, the request's edits are those of its tokens.
    rows.take(row)
    rows.put(make_request("other", [1]), 0)
    moved = rows.put(ruled("more", [9, 9], TokenRules(no_repeat_ngram_size=2)), 0)
    assert rows.sampling_batch(np.array([row, moved])).banned_token_ids == {1: (9,)}
