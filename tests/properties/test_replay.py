"""Windowed replay: prompts that part where only full-attention KV is left, on stacks of every kind.

The fake executor follows, layer by layer, which KV is what it should be; it refuses a token that is sampled where
anything is not, so a replay that starts too late, or a block given to the tree too early, is noticed.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.replay import ReplayRule
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import run_all, serve
from tests.helpers.simulation import Simulation, chunked, full, sliding

STACKS = [
    [full(), sliding(5)],
    [sliding(5), full(), sliding(5), full(2)],
    [sliding(3), sliding(9), full()],
    [chunked(8), sliding(4), full()],
    [sliding(4), chunked(6), full(), sliding(4)],
]


def parting(rng, base, most):
    return [*base[: rng.randint(most // 2, most)], *[rng.randint(0, 49) for _ in range(rng.randint(1, 20))]]


@pytest.mark.parametrize("specs", STACKS, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("prunes", [True, False], ids=["needed tokens", "all tokens"])
def test_prompts_that_part_anywhere_get_the_tokens_that_they_alone_would_get(prunes, specs, page_tokens):
    rng = random.Random(page_tokens)
    base = [rng.randint(0, 49) for _ in range(90)]
    simulation = Simulation(specs, page_tokens=page_tokens, max_model_len=256, chunk_tokens=64, extra_slabs=2000)
    simulation.executor.prunes = prunes
    serve(simulation, base, 8)
    for index in range(5):
        prompts = [parting(rng, base, 90) for _ in range(3)]
        for number, prompt in enumerate(prompts):
            simulation.add(f"r{index}.{number}", prompt, 8)
        run_all(simulation)
        for number, prompt in enumerate(prompts):
            assert simulation.outputs[f"r{index}.{number}"] == foretell(None, prompt, 8)
    assert simulation.executor.num_replayed_tokens > 0
    # Where only those tokens are computed that something depends on, inexact ones need not be among them.
    assert prunes or simulation.executor.num_inexact_outputs > 0


@given(
    specs=st.lists(
        st.sampled_from([full(), full(2), sliding(2), sliding(5), sliding(4, 2), chunked(3), chunked(8)]),
        min_size=2,
        max_size=5,
    ),
    page_tokens=st.sampled_from([1, 2, 5]),
    chunk_tokens=st.sampled_from([7, 40]),
    extra_slabs=st.sampled_from([150, 3000]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_stacks_with_aborts_failures_and_evictions(specs, page_tokens, chunk_tokens, extra_slabs, seed):
    rng = random.Random(seed)
    base = [rng.randint(0, 49) for _ in range(70)]
    simulation = Simulation(
        specs, page_tokens=page_tokens, max_model_len=120, chunk_tokens=chunk_tokens, extra_slabs=extra_slabs
    )
    serve(simulation, base, 4)
    expected = {}
    for index in range(12):
        prompt = parting(rng, base, 70)
        simulation.add(f"r{index}", prompt, 6)
        expected[f"r{index}"] = foretell(None, prompt, 6)
        for _ in range(rng.randint(0, 4)):
            simulation.step(fail=rng.random() < 0.15)
        if rng.random() < 0.15:
            simulation.finish(f"r{index}") if not simulation.requests[f"r{index}"].is_finished else None
        if rng.random() < 0.3:
            simulation.manager.inspect().tree.evict_one()
    run_all(simulation)
    for name, tokens in expected.items():
        assert simulation.outputs[name] == tokens[: len(simulation.outputs[name])]
        if simulation.requests[name].finish_reason == "length":
            assert len(simulation.outputs[name]) == 6


@pytest.mark.parametrize(
    ("specs", "position", "start", "exact"),
    [
        # Twelve windows of 128: 12 * 127 = 1,524 tokens and a block, down to a block boundary.
        ([spec for _ in range(12) for spec in (sliding(128), full())], 30_000, 28_448, [28_448 + 1397, 28_448 + 1524]),
        ([full(), chunked(64)], 1000, 960, [960, 960]),
        ([full(), chunked(64)], 960, 896, [896, 896]),  # the block before 960 is in the chunk before
        ([full(), sliding(8), sliding(21)], 100, 48, [48, 48, 55]),
        ([full(), sliding(8)], 20, 0, [0, 0]),
    ],
)
def test_where_a_replay_starts_and_from_where_its_kv_is_exact(specs, position, start, exact):
    rule = ReplayRule(build_layout(specs, page_tokens=16))
    assert rule.start(position) == start
    assert rule.exact_from(start) == exact


def test_a_replay_that_costs_half_or_more_is_not_made():
    """W 5, pages of 1: 4 tokens are replayed. After a resume point at 60, parting at 68 saves 4 of 8 tokens: half,
    not made; at 69 it saves 5 of 9."""
    for shared, hit in ((68, 60), (69, 65)):
        simulation = Simulation([full(), sliding(5)], page_tokens=1, max_model_len=256, chunk_tokens=128)
        serve(simulation, list(range(60)), 1)
        serve(simulation, [*range(60), *range(100, 130)], 1)
        assert serve(simulation, [*range(60), *range(100, 100 + shared - 60), 7, 8], 4) == hit


def test_replay_can_be_switched_off():
    simulation = Simulation([full(), sliding(5)], page_tokens=1, max_model_len=256, windowed_replay=False)
    serve(simulation, list(range(100)), 1)
    assert serve(simulation, [*range(70), 7, 8], 4) == 0
