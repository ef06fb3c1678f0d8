"""A step launches what it launched and sends what it sent. Less is good news, and pinned anew; more needs a reason."""

from __future__ import annotations

import pytest

from tests.pins import steps, stored


@pytest.mark.slow
@pytest.mark.parametrize("backend", steps.BACKENDS)
def test_launches_and_bytes_of_a_step(backend: str) -> None:
    stored.require_equal("steps", {backend: stored.load("steps")[backend]}, {backend: steps.measure(backend)})


def test_every_backend_is_pinned() -> None:
    pinned = stored.load("steps")
    assert list(pinned) == list(steps.BACKENDS)
    for by_step in pinned.values():
        assert by_step["decode"]["tokens"] == by_step["decode"]["requests"] == len(steps.PROMPT_LENGTHS)
        assert by_step["prefill"]["tokens"] == sum(steps.PROMPT_LENGTHS)
        assert all(sum(step["kernels"].values()) == step["num_kernels"] > 0 for step in by_step.values())
        assert by_step["decode"]["packed_bytes"] < by_step["prefill"]["packed_bytes"]
