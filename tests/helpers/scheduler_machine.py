"""A state machine of the scheduler's life, for Hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lamella.errors import CapacityError, InvariantError, RequestError
from lamella.kv_cache import invariants
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, chunked, full, sliding

LAYERS = [
    full(),
    full(2),
    full(1, 3, 1),
    sliding(1),
    sliding(2),
    sliding(5),
    sliding(13),
    sliding(4, 2),
    chunked(3),
    chunked(8),
    sliding(9, 3),  # with full() or full(2): pages of different sizes, several to a slab, so that slabs move
    full(3),
]
MAX_MODEL_LEN = 70
# Prompts are prefixes of a few bases with a tail, so that they share much and part anywhere.
BASES = [[(7 * base + 3 * i * (base + 1)) % 50 for i in range(60)] for base in range(3)]


def last_of_each_kind(specs) -> dict[int, int]:
    """Every last layer of its kind reads the KV of the first."""
    first = {spec: layer for layer, spec in reversed(list(enumerate(specs)))}
    last = {spec: layer for layer, spec in enumerate(specs)}
    return {last[spec]: first[spec] for spec in first if last[spec] != first[spec]}


class SchedulerMachine(RuleBasedStateMachine):
    simulation_class = Simulation

    @initialize(
        specs=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6),
        page_tokens=st.sampled_from([3, 1, 3, 16]),
        extra_slabs=st.sampled_from([0, 1, 3, 8, 40, 400, 400]),
        chunk_tokens=st.sampled_from([4, 5, 16, 40, 40, 40]),
        max_num_seqs=st.sampled_from([1, 2, 4]),
        interval_tokens=st.sampled_from([None, 1, 6, 20]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "prefix"]),
        retention=st.sampled_from([("tails",), ("tails", None, False), ("tails", 10), ("all",), ("none",)]),
        replay=st.sampled_from([True, True, False]),
        step_tokens=st.sampled_from([48, 0, 6, 24, 48]),
        never_idle=st.sampled_from([True, False, True]),
        shares_kv=st.sampled_from([False, False, True]),
    )
    def start(self, specs, page_tokens, extra_slabs, retention, policy, replay, caching, shares_kv, **sizes):
        self.simulation = self.simulation_class(
            specs,
            page_tokens=page_tokens,
            max_model_len=MAX_MODEL_LEN,
            extra_slabs=extra_slabs,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            retention=RetentionPolicy(*retention),
            windowed_replay=replay,
            kv_sharing=last_of_each_kind(specs) if shares_kv else None,
            **sizes,
        )
        self.expected: dict[str, list[int]] = {}
        self.pinned: dict[str, tuple[list[int], str | None]] = {}

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 58) | st.integers(40, 58),
        tail=st.lists(st.integers(0, 49), min_size=1, max_size=3),
        num_tokens=st.integers(1, 25),
        salt=st.sampled_from([None, None, None, "tenant"]),
        boundaries=st.sets(st.integers(1, 61), max_size=3),
    )
    def add(self, base, shared, tail, num_tokens, salt, boundaries=()):
        prompt = [*base[:shared], *tail]
        request_id = f"r{len(self.simulation.requests)}"
        inside = sorted(one for one in boundaries if one <= len(prompt))
        self.simulation.add(request_id, prompt, num_tokens, salt, boundaries=inside)
        self.expected[request_id] = foretell(salt, prompt, min(num_tokens, MAX_MODEL_LEN - len(prompt)))

    @rule(request=st.randoms(use_true_random=False), num_tokens=st.integers(1, 10))
    def next_turn(self, request, num_tokens):
        """Resend a finished request with its answer, as a chat does."""
        done = [name for name, one in self.simulation.requests.items() if one.finish_reason == "length"]
        if done:
            name = request.choice(done)
            earlier = self.simulation.requests[name]
            prompt = [*earlier.token_ids[: earlier.num_prompt_tokens].tolist(), *self.expected[name], 9]
            if len(prompt) < MAX_MODEL_LEN:
                request_id = f"r{len(self.simulation.requests)}"
                self.simulation.add(request_id, prompt, num_tokens, earlier.salt)
                self.expected[request_id] = foretell(earlier.salt, prompt, min(num_tokens, MAX_MODEL_LEN - len(prompt)))

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.simulation.step()

    @rule()
    def failing_step(self):
        self.simulation.step(fail=True)

    @rule(choice=st.integers(0, 3), num_steps=st.integers(1, 3))
    def unusable_logits(self, choice, num_steps):
        self.simulation.spoilt_sample = choice
        for _ in range(num_steps):
            self.simulation.step()

    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice):
        alive = [name for name, request in self.simulation.requests.items() if not request.is_finished]
        if alive:
            self.simulation.finish(choice.choice(alive))

    @precondition(lambda self: self.simulation.scheduler.running)
    @rule()
    def preempt_youngest(self):
        self.simulation.scheduler._preempt(self.simulation.scheduler.running[-1])

    @rule()
    def reset_prefix_cache(self):
        self.simulation.manager.reset_prefix_cache()

    @rule()
    def evict(self):
        self.simulation.manager.inspect().tree.evict_one()

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(1, 60),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def pin(self, base, length, salt):
        manager = self.simulation.manager
        before = manager.pinned()
        try:
            manager.pin(f"pin {len(self.pinned)}", np.array(base[:length]), salt)
            self.pinned[f"pin {len(self.pinned)}"] = (base[:length], salt)
        except (CapacityError, RequestError):
            assert manager.pinned() == before
        invariants.check(manager)

    @rule(choice=st.randoms(use_true_random=False))
    def unpin(self, choice):
        if pinned := self.simulation.manager.pinned():
            self.simulation.manager.unpin(choice.choice(pinned).name)
            invariants.check(self.simulation.manager)

    def teardown(self):
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.run()
        for name, request in simulation.requests.items():
            if request.finish_reason == "length":
                assert simulation.outputs[name] == self.expected[name]
            else:
                assert request.finish_reason in ("abort", "error", "stop")
                output = simulation.outputs[name]
                assert output == self.expected[name][: len(output)]
        if not simulation.manager.reset_prefix_cache():
            raise InvariantError("something is still cached after everything was evicted")
        for pin in simulation.manager.pinned():
            tokens, salt = self.pinned[pin.name]
            found = simulation.manager.match(np.array([*tokens, 49, 49]), salt).num_tokens
            assert found >= pin.num_tokens or not pin.is_cached
            simulation.manager.unpin(pin.name)
        if not simulation.manager.reset_prefix_cache():
            raise InvariantError("what was pinned is still cached")
        assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
        assert simulation.manager.inspect().arena.num_free_slabs == simulation.manager.inspect().arena.num_slabs - 1
        assert simulation.manager.inspect().tree.roots() == {}
