from __future__ import annotations

import dataclasses

import pytest

from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


@pytest.mark.parametrize(("reason", "finished"), [(None, False), ("stop", True), ("length", True), ("abort", True)])
def test_completion_is_finished_once_it_has_a_reason(reason, finished: bool) -> None:
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason=reason).finished() is finished


def test_what_is_optional_is_absent_by_default() -> None:
    completion = CompletionOutput(index=1, text="hi", token_ids=[3, 4])
    assert (completion.cumulative_logprob, completion.logprobs, completion.stop_reason) == (None, None, None)
    output = RequestOutput(request_id="7", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=False)
    assert (output.metrics, output.num_cached_tokens) == (None, 0)
    metrics = RequestMetrics(arrival_time=2.5)
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (None, None, None)
    assert metrics.num_preemptions == 0
    assert (Logprob(-0.5).rank, Logprob(-0.5).decoded_token) == (None, None)


@pytest.mark.parametrize(
    "value",
    [
        Logprob(-1.0, 2, "x"),
        RequestMetrics(arrival_time=0.0),
        CompletionOutput(index=0, text="", token_ids=[]),
        RequestOutput(request_id="0", prompt="p", prompt_token_ids=[], outputs=[], finished=True),
    ],
)
def test_outputs_are_frozen_values(value) -> None:
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
    assert dataclasses.replace(value) == value
    assert not hasattr(value, "__dict__")
