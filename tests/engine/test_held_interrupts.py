"""Ctrl-C for the time of some work: held back where Python's handler is there, put back, raised once."""

from __future__ import annotations

import signal
import threading

import pytest

from lamella.engine.held_interrupts import HeldInterrupts


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def pythons_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_when_the_work_is_done():
    done = []

    def work():
        interrupt()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        HeldInterrupts().run(work)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_once_and_not_again_by_the_next_work():
    held = HeldInterrupts()
    with pytest.raises(KeyboardInterrupt):
        held.run(interrupt)
    held.run(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        held.run(interrupt)


def test_a_second_one_is_raised_at_once_and_in_place_of_the_first():
    done = []

    def work():
        interrupt()
        done.append("went on after the first")
        interrupt()
        done.append("went on after the second")

    held = HeldInterrupts()
    with pytest.raises(KeyboardInterrupt):
        held.run(work)
    assert done == ["went on after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    held.run(lambda: None)


def test_the_handler_is_put_back_when_the_work_fails():
    def work():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        HeldInterrupts().run(work)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_outlives_an_exception_of_the_work():
    def work():
        interrupt()
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        HeldInterrupts().run(work)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, lambda signum, frame: None])
def test_no_other_handler_is_touched(handler):
    signal.signal(signal.SIGINT, handler)
    seen = []
    HeldInterrupts().run(lambda: seen.append(signal.getsignal(signal.SIGINT)))
    assert seen == [handler]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_meanwhile_stays():
    def other(signum, frame):
        pass

    HeldInterrupts().run(lambda: signal.signal(signal.SIGINT, other))
    assert signal.getsignal(signal.SIGINT) is other


def test_in_another_thread_nothing_is_touched():
    seen = []
    thread = threading.Thread(target=HeldInterrupts().run, args=(lambda: seen.append(signal.getsignal(signal.SIGINT)),))
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_it_is_held_back_where_another_thread_runs_too():
    """Where a signal is blocked in the main thread another one takes it, and Python interrupts the main one anyway."""
    stops, done = threading.Event(), []
    thread = threading.Thread(target=stops.wait)
    thread.start()

    def work():
        interrupt()
        done.append(1)

    try:
        with pytest.raises(KeyboardInterrupt):
            HeldInterrupts().run(work)
    finally:
        stops.set()
        thread.join()
    assert done


def test_one_that_was_left_behind_acts_like_pythons_own():
    """As after an exception between the setting of the handler and the work."""
    held = HeldInterrupts()
    signal.signal(signal.SIGINT, held._own)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, held._own)
    held.run(lambda: None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
