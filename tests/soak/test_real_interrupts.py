"""The soak with real signals in small: that it runs, and that nothing is wrong in its first runs."""

from __future__ import annotations

import gc
import signal

import pytest

from tests.soak.real_interrupts import soak


@pytest.fixture(autouse=True)
def pythons_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGALRM, before[1])


@pytest.fixture(autouse=True)
def no_callbacks_of_the_collector():
    """Python ignores what is raised in one, and Hypothesis has one wherever it has run: an interrupt would be lost."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


def test_runs_with_a_real_interrupt_give_the_right_answers():
    happened, wrong = soak(40, seed=3)
    assert wrong == []
    assert sum(count for (_, _, ended), count in happened.items() if not ended.startswith("0")) > 20


@pytest.mark.slow
def test_many_runs_with_a_real_interrupt_give_the_right_answers():
    assert soak(400, seed=4)[1] == []
