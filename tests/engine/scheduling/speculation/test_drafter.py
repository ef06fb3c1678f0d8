from __future__ import annotations

import pytest

from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from tests.helpers.made_requests import make_request

FREE = StepCosts([1], [1.0])


def drafter(costs=FREE, **settings):
    return Drafter(SpeculationSettings(**{"num_draft_tokens": 4, "least_probability": 0.0, **settings}), costs)


def rows_with(*requests):
    rows = RequestRows(len(requests), 64)
    for request in requests:
        rows.put(request, 0)
    return rows


def give(rows, row, *token_ids):
    for token_id in token_ids:
        rows.tokens[row, rows.num_tokens[row]] = token_id
        rows.num_tokens[row] += 1


def test_what_followed_before_is_drafted_as_far_as_the_match_allows():
    rows = rows_with(make_request("a", [1, 2, 3, 4, 5, 6, 9, 1, 2]), make_request("b", [7, 8]))
    free = {0: 9, 1: 9}
    assert drafter().drafts(rows, free, 2, 99) == {0: [3, 4]}, "a match of two gives two; b has none"
    assert drafter(drafts_per_match_token=None).drafts(rows, free, 2, 99) == {0: [3, 4, 5, 6]}
    assert drafter(drafts_per_match_token=None).drafts(rows, {0: 3, 1: 9}, 2, 99) == {0: [3, 4, 5]}
    assert drafter(drafts_per_match_token=None).drafts(rows, free, 2, 1) == {0: [3]}
    assert drafter(least_match_tokens=3).drafts(rows, free, 2, 99) == {}
    assert drafter(StepCosts([1, 8], [1.0, 8.0])).drafts(rows, free, 2, 99) == {}, "no draft pays"
    assert drafter().drafts(rows, {0: 0, 1: 9}, 2, 99) == {}


def test_texts_grow_with_their_rows_and_go_with_their_requests():
    request = make_request("a", [1, 2, 3])
    rows, made = rows_with(request), drafter()
    assert made.drafts(rows, {0: 9}, 1, 99) == {}
    give(rows, 0, 1)
    assert made.drafts(rows, {0: 9}, 1, 99) == {0: [2]}
    give(rows, 0, 2, 3)
    assert made.drafts(rows, {0: 9}, 1, 99) == {0: [1, 2, 3]}
    made.forget(rows.take(0))
    made.forget(request)
    assert made._texts == {}


def test_a_text_that_lost_tokens_is_read_anew():
    rows, made = rows_with(make_request("a", [1, 2, 3])), drafter()
    give(rows, 0, 1, 9)
    made.drafts(rows, {0: 9}, 1, 99)
    rows.num_tokens[0] -= 1  # as after a failed step
    assert made.drafts(rows, {0: 9}, 1, 99) == {0: [2]}


def test_drafts_that_fail_are_made_no_more():
    """The request learns from every token, whether drafts were verified or not."""
    rows = rows_with(make_request("a", [1, 2, 1, 3, 1]))
    made = drafter(StepCosts([1, 2, 9], [1.0, 1.3, 4.0]), least_probability=0.1)
    num_drafts = []
    for token in range(10, 25):
        num_drafts.append(len(made.drafts(rows, {0: 9}, 1, 99).get(0, [])))
        give(rows, 0, token, 1)  # after a 1 always comes something new
    assert num_drafts[0] == 1
    assert num_drafts[-5:] == [0] * 5


def test_the_grammar_of_a_request_cuts_its_drafts():
    class Grammar:
        problem = None

        def num_allowed(self, output_ids, next_ids):
            assert output_ids.tolist() == [1, 2]
            assert next_ids == [3, 4, 5]
            return 1

    rows = rows_with(make_request("a", [1, 2, 0, 1, 2, 3, 4, 5, 0, 0]))
    rows.request(0).grammar = Grammar()
    give(rows, 0, 1, 2)
    assert drafter().drafts(rows, {0: 9}, 1, 99) == {0: [3]}


def test_no_draft_is_made_of_a_token_that_ends_the_request():
    rows = rows_with(make_request("a", [1, 2, 3, 4, 5, 0, 1, 2], stop_token_ids=(5,)))
    assert drafter(drafts_per_match_token=None).drafts(rows, {0: 9}, 1, 99) == {0: [3, 4]}


def test_functions_of_logits_see_no_drafts():
    rows = rows_with(make_request("a", [1, 2, 3, 4, 0, 1, 2]))
    rows.request(0).logits_functions = (lambda prompt, output, logits: logits,)
    assert drafter().drafts(rows, {0: 9}, 1, 99) == {}


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_finished_outputs_are_drafted_from_within_a_salt(salt):
    first = make_request("a", [1, 2], max_tokens=8)
    rows = rows_with(first)
    first.salt = "tenant"
    made = drafter(num_shared_outputs=5, drafts_per_match_token=None)
    give(rows, 0, 5, 6, 7, 8)
    made.drafts(rows, {0: 9}, 1, 99)
    made.forget(rows.take(0))
    second = make_request("b", [9, 5, 6])
    second.salt = salt
    rows = rows_with(second)
    assert made.drafts(rows, {0: 9}, 1, 99) == ({0: [7, 8]} if salt else {})
    made.clear()
    assert made.drafts(rows_with(make_request("c", [9, 5, 6])), {0: 9}, 1, 99) == {}
