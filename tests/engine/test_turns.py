"""One thread at a time, in turn, and never one twice while another waits."""

from __future__ import annotations

import threading
import time

import pytest

from lamella.engine.turns import Turns, in_turn


def test_a_thread_that_waits_is_next():
    turns, has_had_its_turn = Turns(), threading.Event()
    waiting = threading.Thread(target=turns.run, args=(has_had_its_turn.set,))

    def hold():
        waiting.start()
        while not turns.num_waiting:
            time.sleep(0.001)
        turns.run(lambda: None)  # its holder may
        assert not has_had_its_turn.is_set()

    turns.run(hold)
    assert turns.run(has_had_its_turn.is_set)
    waiting.join()


def test_a_turn_that_raises_is_over():
    turns, has_had_its_turn = Turns(), threading.Event()

    def interrupted():
        turns.run(lambda: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.run(interrupted)
    other = threading.Thread(target=turns.run, args=(has_had_its_turn.set,), daemon=True)
    other.start()
    assert has_had_its_turn.wait(60)
    assert not turns.num_waiting


def test_methods_in_turn_of_one_object_never_overlap_and_may_call_each_other():
    class Counted:
        def __init__(self):
            self._turns, self.num_inside, self.most_inside, self.calls = Turns(), 0, 0, []

        @in_turn
        def outer(self, name, *, times):
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            for _ in range(times):
                self.inner(name)
                time.sleep(0)
            self.num_inside -= 1
            return name

        @in_turn
        def inner(self, name):
            """What it says it does."""
            self.calls.append(name)

    counted, returned = Counted(), []
    threads = [
        threading.Thread(target=lambda name=name: returned.append(counted.outer(name, times=20))) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(returned) == list("abcd")
    assert counted.most_inside == 1
    runs = [counted.calls[start : start + 20] for start in range(0, 80, 20)]
    assert sorted("".join(run) for run in runs) == [20 * name for name in "abcd"], "another came in between"
    assert Counted.inner.__doc__ == "What it says it does."
