"""What becomes of the requests that a step sampled a token for, told from the rules one request at a time."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.scheduling.new_tokens import NewToken, append_tokens
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import StepResult, TokenLogprobs
from tests.helpers.made_requests import make_request


def rows_with(*requests):
    rows = RequestRows(len(requests), 32)
    for request in requests:
        rows.put(request, 0)
    return rows


def result(token_ids, **more):
    return StepResult(token_ids=np.array(token_ids), logprobs=more.pop("logprobs", {}), **more)


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "ends"),
    [
        (5, 2, (None, None)),
        (9, 2, ("stop", None)),  # the model's end
        (7, 2, ("stop", 7)),  # its own, which is named
        (5, 1, ("length", None)),
        (7, 1, ("stop", 7)),  # an end that is reached with the last token allowed is an end
        (9, 1, ("stop", None)),
    ],
)
def test_why_a_request_ends(token_id, max_tokens, ends):
    request = make_request("r", [1, 2, 3], max_tokens=max_tokens, eos_token_ids=[9], stop_token_ids=[7])
    rows = rows_with(request)
    new = append_tokens(rows, np.array([0]), result([token_id]))
    assert (request.finish_reason, request.stop_reason) == ends
    assert new.ended == ([request] if ends[0] else [])
    assert list(new.each()) == [NewToken(request, token_id)]
    assert rows.tokens[0, :4].tolist() == [1, 2, 3, token_id]
    assert rows.num_tokens.tolist() == [4]


def test_an_end_token_of_one_request_is_any_token_to_another():
    first, second = make_request("a", [1], stop_token_ids=[7]), make_request("b", [1], stop_token_ids=[8])
    append_tokens(rows_with(first, second), np.array([0, 1]), result([8, 7]))
    assert (first.finish_reason, second.finish_reason) == (None, None)


def test_the_first_token_has_a_time_and_later_ones_leave_it():
    request = make_request("r", [1, 2])
    rows = rows_with(request)
    assert request.first_token_time is None
    append_tokens(rows, np.array([0]), result([5]))
    first = request.first_token_time
    assert first is not None
    append_tokens(rows, np.array([0]), result([6]))
    assert request.first_token_time == first


def test_without_a_usable_token_a_request_ends_alone():
    """The others' log-probabilities stay theirs."""
    requests = [make_request(name, [1, 2]) for name in "abc"]
    rows = rows_with(*requests)
    found = TokenLogprobs(6, -0.5, 1, np.array([6]), np.array([-0.5], dtype=np.float32))
    new = append_tokens(rows, np.array([0, 1, 2]), result([4, 5, 6], unusable={1: "NaN"}, logprobs={2: found}))
    assert [request.finish_reason for request in requests] == [None, "error", None]
    assert requests[1].stop_reason == "NaN"
    assert new.failed == [requests[1]]
    assert list(new.each()) == [NewToken(requests[0], 4), NewToken(requests[2], 6)]
    assert rows.num_tokens.tolist() == [3, 2, 3]
    assert [request.output_logprobs for request in requests] == [[], [], [found]]
