"""Random lives with a step in flight, on a device that computes as late as it may.

The machine's own checks hold as ever: each request gets the tokens that its prompt alone foretells, and everything is
accounted for. LateSimulation adds those of steps in flight.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.scheduler_machine import BASES, MAX_MODEL_LEN, SchedulerMachine


class AsyncMachine(SchedulerMachine):
    simulation_class = LateSimulation

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 40),
        num_tokens=st.integers(2, 25),
        stop_after=st.integers(0, 12),
    )
    def add_with_stop(self, base, shared, num_tokens, stop_after):
        """A request that ends by a token, which nobody knows before it is sampled."""
        prompt = [*base[:shared], 7]
        request_id = f"r{len(self.simulation.requests)}"
        free = foretell(None, prompt, min(num_tokens, MAX_MODEL_LEN - len(prompt)))
        stop = free[min(stop_after, len(free) - 1)]
        self.simulation.add(request_id, prompt, num_tokens, stop_token_ids=[stop])
        self.expected[request_id] = free[: free.index(stop) + 1]

    @rule(num_tokens=st.integers(1, 20), count=st.integers(2, 4))
    def add_twins(self, num_tokens, count):
        """Equal requests compute equal blocks, of which one stays."""
        for _ in range(count):
            self.add(BASES[0], 20, [3], num_tokens, None)

    @rule()
    def failing_launch(self):
        self.simulation.step(fail=True, fail_at="launch")

    @precondition(lambda self: self.simulation.scheduler.running and not self.simulation.launched)
    @rule()
    def preempt_youngest(self):
        self.simulation.scheduler._preempt(self.simulation.scheduler.running[-1])

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.run()
            for name, request in self.simulation.requests.items():
                if request.finish_reason == "stop":
                    assert self.simulation.outputs[name] == self.expected[name]
        super().teardown()


AsyncMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("LAMELLA_MACHINE_EXAMPLES", "20")),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAsyncMachine = AsyncMachine.TestCase
