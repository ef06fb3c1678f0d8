"""A step launches what it launched and sends what it sent. Less is good news, and pinned anew; more needs a reason."""

from __future__ import annotations

import pytest

from tests.pins import steps, stored


@pytest.mark.slow
@pytest.mark.parametrize("backend", list(stored.load("steps")))
def test_launches_and_bytes_of_a_step(backend: str) -> None:
    stored.require_equal("steps", {backend: stored.load("steps")[backend]}, {backend: steps.measure(backend)})


def test_the_native_kernels_are_pinned() -> None:
    assert set(steps.BACKENDS) >= set(stored.load("steps")) >= {"native"}
