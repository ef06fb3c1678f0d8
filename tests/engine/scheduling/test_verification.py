"""Which samples count, told from the rule one sample at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.engine.scheduling.new_tokens import append_tokens
from lamella.engine.scheduling.planned_steps import PlannedStep
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.verification import verify
from lamella.model_executor.step_plan import StepResult, TokenLogprobs
from tests.helpers.made_requests import make_request

EOS, STOP = 9, 7


def rows_with(*requests):
    rows = RequestRows(len(requests), 64)
    for request in requests:
        rows.put(request, len(request.token_ids) - 1)
    return rows


def logprobs_of(token_id):
    return TokenLogprobs(token_id, -0.5, 1, np.array([token_id]), np.array([-0.5], dtype=np.float32))


def one_by_one(drafts, samples, unusable, max_tokens):
    """What the request gets without drafts, as far as this step's samples tell; how it ends."""
    given = []
    for place, sample in enumerate(samples):
        if place in unusable:
            return given, "error"
        given.append(sample)
        if sample in (EOS, STOP):
            return given, "stop"
        if len(given) == max_tokens:
            return given, "length"
        if place == len(drafts) or drafts[place] != sample:
            return given, None
    raise AssertionError


@pytest.mark.parametrize("seed", range(80))
def test_a_row_gets_what_it_would_have_got_one_by_one(seed):
    draw = random.Random(seed)
    requests, drafts, samples, unusable = [], [], [], set()
    for name in "abcd":
        num_drafts = draw.choice([0, 1, 3, 5])
        sampled = [draw.choice([1, 2, 3, 4, EOS if draw.random() < 0.2 else 5, STOP if draw.random() < 0.2 else 6])
                   for _ in range(num_drafts + 1)]  # fmt: skip
        guesses = [one if draw.random() < 0.8 else 8 for one in sampled[:num_drafts]]
        max_tokens = num_drafts + 1 if draw.random() < 0.3 else 20
        requests.append(
            make_request(name, [1, 2, 3], max_tokens=max_tokens, eos_token_ids=[EOS], stop_token_ids=[STOP])
        )
        drafts.append(guesses)
        samples.append(sampled)
    rows = rows_with(*requests)
    order = [index for index in range(4) if not drafts[index]] + [index for index in range(4) if drafts[index]]
    sampled_rows = np.array([row for row in order for _ in samples[row]])
    flat = [sample for row in order for sample in samples[row]]
    for row in order:
        rows.tokens[row, 3 : 3 + len(drafts[row])] = drafts[row]
    if draw.random() < 0.5:
        unusable = set(draw.sample(range(len(flat)), 2))
    step = PlannedStep(
        np.array(order), np.array([1 + len(drafts[row]) for row in order]), sampled_rows, frozenset(),
        num_drafts=np.array([len(drafts[row]) for row in order]),
    )  # fmt: skip
    logprobs = {place: logprobs_of(sample) for place, sample in enumerate(flat) if place not in unusable}
    result = StepResult(np.array(flat), logprobs, dict.fromkeys(unusable, "NaN"))
    verified = verify(rows, step, result)
    part = result.part(verified.samples)
    new = append_tokens(rows, sampled_rows[verified.samples], part, verified.offsets)

    start, expected, proposed, accepted = 0, [], 0, 0
    for place, row in enumerate(order):
        own = {index - start for index in unusable if start <= index < start + len(samples[row])}
        start += len(samples[row])
        request = requests[row]
        given, reason = one_by_one(drafts[row], samples[row], own, request.max_total_tokens - 3)
        expected += [(request, token) for token in given]
        assert request.finish_reason == reason
        assert request.stop_reason == {"error": "NaN", "stop": STOP if given[-1:] == [STOP] else None}.get(reason)
        assert rows.tokens[row, : rows.num_tokens[row]].tolist() == [1, 2, 3, *given]
        assert [one.token_id for one in request.output_logprobs] == given
        # Computed are the token before the drafts and the drafts that the request got: all it has but the last.
        num_computed = len(given) + (reason == "error")
        assert 1 + len(drafts[row]) - verified.num_rejected[place] == num_computed
        assert request.num_draft_tokens == len(drafts[row])
        assert request.num_accepted_tokens == num_computed - 1
        proposed += len(drafts[row])
        accepted += num_computed - 1
    assert list(zip(new.requests, new.token_ids, strict=True)) == expected
    assert new.ended == [requests[row] for row in order if requests[row].finish_reason in ("stop", "length")]
    assert set(new.failed) == {request for request in requests if request.finish_reason == "error"}
    lasts = [
        index
        for index, (request, _) in enumerate(expected)
        if all(other is not request for other, _ in expected[index + 1 :])
    ]
    assert [index for index, one in enumerate(new.each()) if one.is_last] == lasts
    assert (verified.num_drafts.sum(), verified.num_accepted.sum()) == (proposed, accepted)
    assert (verified.num_accepted <= verified.num_drafts).all()
    assert (np.diff(verified.num_drafts) <= 0).all()
