"""Random lives with drafts that are right or wrong at random: whatever is accepted, every key read is the right one,
every page is accounted for, and each request gets the tokens that its prompt alone foretells."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from lamella.engine.scheduling import scheduler as scheduler_module
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.engine.scheduling.verification import verify
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.random_drafts import RandomDrafts
from tests.helpers.scheduler_machine import LAYERS, MAX_MODEL_LEN, SchedulerMachine, last_of_each_kind
from tests.helpers.simulation import Simulation, chunked, full, sliding

NUM_LIVES = int(os.environ.get("LAMELLA_MACHINE_EXAMPLES", "100")) // 4


class SpeculationMachine(SchedulerMachine):
    @initialize(
        specs=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
        page_tokens=st.sampled_from([3, 1, 4, 16]),
        extra_slabs=st.sampled_from([0, 1, 3, 8, 40]),
        chunk_tokens=st.sampled_from([4, 16, 40]),
        max_num_seqs=st.sampled_from([1, 2, 4]),
        interval_tokens=st.sampled_from([None, 1, 6, 20]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "prefix"]),
        retention=st.sampled_from([("tails",), ("tails", 10), ("all",), ("none",)]),
        replay=st.booleans(),
        step_tokens=st.sampled_from([48, 0]),
        shares_kv=st.booleans(),
        most_drafts=st.sampled_from([1, 3, 7, 20]),
        share_right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    )
    def start(  # type: ignore[override]
        self, specs, page_tokens, extra_slabs, retention, policy, replay, caching, shares_kv, most_drafts, share_right,
        **sizes,
    ):  # fmt: skip
        self.simulation = Simulation(
            specs,
            page_tokens=page_tokens,
            max_model_len=MAX_MODEL_LEN,
            extra_slabs=extra_slabs,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            retention=RetentionPolicy(*retention),
            windowed_replay=replay,
            kv_sharing=last_of_each_kind(specs) if shares_kv else None,
            drafter=RandomDrafts(most_drafts, share_right, seed=len(specs)),
            **sizes,
        )
        self.expected: dict[str, list[int]] = {}
        self.pinned: dict[str, tuple[list[int], str | None]] = {}
        self.most_drafts, self.page_tokens = most_drafts, page_tokens
        self.interval = max(sizes["interval_tokens"] or page_tokens, page_tokens)

    @invariant()
    def what_was_rejected_is_not_in_the_tree(self):
        """Nor counted as computed: between steps a row has entered no block beyond what it has computed."""
        if not hasattr(self, "simulation"):
            return
        rows, tables = self.simulation.scheduler.rows, self.simulation.manager.inspect().rows
        for row in self.simulation.scheduler.running:
            computed = int(rows.num_computed[row])
            assert computed < rows.num_tokens[row]
            replayed = tables.replay_end.get(row, 0)
            assert tables.num_committed[row] * self.page_tokens <= max(computed, replayed)
            if computed + 1 < rows.num_tokens[row] or computed < rows.num_prompt_tokens[row] + self.interval:
                continue  # a prompt's chunk may have more pages, until the row has decoded for a while
            for group, spec in enumerate(self.simulation.manager.layout.groups):
                if spec.spec.reach_tokens is not None:
                    held = int(np.count_nonzero(tables.pages[group, row] != NULL_PAGE))
                    tokens = spec.spec.reach_tokens + self.interval + self.most_drafts
                    assert held <= -(-tokens // self.page_tokens) + 1


class LongSpeculationMachine(SpeculationMachine):
    """The same, for `make test-full`."""


def _lives_of(machine, num_lives, step_count):
    test = machine.TestCase
    test.settings = settings(
        max_examples=num_lives,
        stateful_step_count=step_count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return test


TestSpeculationMachine = _lives_of(SpeculationMachine, NUM_LIVES // 2, 20)
TestLongSpeculationMachine = pytest.mark.slow(_lives_of(LongSpeculationMachine, 20 * NUM_LIVES, 40))


def _lives(num_lives=12):
    """Short lives with drafts, each checked at every step and at its end."""
    for seed in range(num_lives):
        draw = random.Random(seed)
        specs = [full(), sliding(draw.choice([2, 5, 9, 13])), chunked(8)][: draw.choice([1, 2, 3])]
        simulation = Simulation(
            specs, page_tokens=draw.choice([1, 3, 4]), chunk_tokens=11, max_num_seqs=4,
            extra_slabs=draw.choice([0, 3, 40]),
            drafter=RandomDrafts(draw.choice([3, 8]), draw.choice([0.3, 0.8]), seed),
        )  # fmt: skip
        expected = {}
        for index in range(5):
            prompt = [draw.randrange(50) for _ in range(draw.randint(1, 30))]
            num_tokens = draw.randint(1, 25)
            simulation.add(f"r{index}", prompt, num_tokens)
            expected[f"r{index}"] = foretell(None, prompt, min(num_tokens, 64 - len(prompt)))
            simulation.step()
        simulation.run()
        assert simulation.outputs == expected


def _counts_rejected_as_computed(rows, step, result):
    verified = verify(rows, step, result)
    return verified._replace(num_rejected=np.zeros_like(verified.num_rejected))


def _accepts_all(rows, step, result):
    verified = verify(rows, step, result)
    counts = np.bincount(step.sampled_rows, minlength=len(rows.num_tokens))[step.rows]
    offsets = np.concatenate([np.arange(count) for count in counts])
    nothing = np.zeros_like(verified.num_rejected)
    return verified._replace(samples=np.arange(len(offsets)), offsets=offsets, num_rejected=nothing)


def test_short_lives_are_right():
    _lives()


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (scheduler_module, "verify", _counts_rejected_as_computed),
        (scheduler_module, "verify", _accepts_all),
        (Scheduler, "_grow_for_drafts", lambda scheduler, row, most: most),
    ],
    ids=["rejected drafts count as computed", "all drafts are accepted", "drafts get no pages"],
)
def test_a_rule_that_is_broken_is_noticed(monkeypatch, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        _lives()
