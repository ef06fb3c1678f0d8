"""A request's own answers."""

from __future__ import annotations

from tests.helpers.made_requests import make_request


def test_what_may_not_end_it_early_is_each_end_once_and_in_order():
    request = make_request("r", [1], eos_token_ids=[9, 2], stop_token_ids=[5, 9])
    assert request.banned_before_min_tokens == (2, 5, 9)


def test_it_is_finished_when_it_has_a_reason():
    request = make_request("r", [1])
    assert not request.is_finished
    request.finish_reason = "length"
    assert request.is_finished
