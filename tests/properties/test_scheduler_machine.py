"""Random lives of random models: whatever happens, every key read is the right one, every page is
accounted for, and each request gets the tokens that its prompt alone foretells."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.helpers.scheduler_machine import SchedulerMachine
from tests.helpers.simulation import chunked, full, sliding

NUM_LIVES = int(os.environ.get("LAMELLA_MACHINE_EXAMPLES", "100"))


def lives_of(machine, num_lives, step_count=25):
    """The machine's test, a class for pytest."""
    test = machine.TestCase
    test.settings = settings(
        max_examples=num_lives,
        stateful_step_count=step_count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return test


class StepPagesMachine(SchedulerMachine):
    """Where step pages are the rule: whole prompts in a chunk, small windows, memory that never idles."""

    @initialize(
        specs=st.lists(st.sampled_from([full(), sliding(2), sliding(5), sliding(4, 2), chunked(3)]), max_size=4),
        page_tokens=st.sampled_from([1, 3]),
        extra_slabs=st.sampled_from([0, 3, 8, 40]),
        max_num_seqs=st.sampled_from([2, 4]),
        retention=st.sampled_from([("tails",), ("tails", None, False), ("tails", 10), ("none",)]),
        replay=st.booleans(),
        step_tokens=st.sampled_from([48, 12]),
        shares_kv=st.booleans(),
    )
    def start(self, specs, page_tokens, extra_slabs, max_num_seqs, retention, replay, step_tokens, shares_kv):
        super().start(
            [sliding(5), *specs],
            page_tokens,
            extra_slabs,
            retention,
            "fcfs",
            replay,
            True,
            shares_kv,
            chunk_tokens=40,
            max_num_seqs=max_num_seqs,
            interval_tokens=None,
            step_tokens=step_tokens,
            never_idle=True,
        )


class LongSchedulerMachine(SchedulerMachine):
    """The same, for `make test-full`."""


class LongStepPagesMachine(StepPagesMachine):
    """The same, for `make test-full`."""


TestSchedulerMachine = lives_of(SchedulerMachine, NUM_LIVES)
TestStepPagesMachine = lives_of(StepPagesMachine, NUM_LIVES)
TestLongSchedulerMachine = pytest.mark.slow(lives_of(LongSchedulerMachine, 10 * NUM_LIVES, 40))
TestLongStepPagesMachine = pytest.mark.slow(lives_of(LongStepPagesMachine, 10 * NUM_LIVES, 40))
