"""Which tokens each layer takes in, against what is found by following every dependency, and counted by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.models.config_json import shared_kv_owners
from lamella.model_executor.receptive_field import ReceptiveField
from lamella.model_executor.step_plan import StepPlan
from tests.helpers.reached_tokens import reached_tokens
from tests.helpers.simulation import Simulation, chunked, full, sliding

LAYERS = [full(), full(2), sliding(1), sliding(3), sliding(9), sliding(6, 2), chunked(5), chunked(12)]


def simulate(specs, *, max_model_len=128, chunk_tokens=60, **options) -> Simulation:
    return Simulation(
        specs, max_model_len=max_model_len, chunk_tokens=chunk_tokens, step_tokens=max_model_len, never_idle=True,
        **options,
    )  # fmt: skip


def taken_in(plan: StepPlan, layout: KVLayout, specs: list[KVCacheSpec]) -> list[list[int]]:
    """Per layer, and what leaves the last."""
    needed = ReceptiveField(layout, specs).needed_tokens(plan)
    assert sorted(needed) == list(range(len(specs) + 1 - len(needed), len(specs) + 1))
    every = range(len(plan.token_ids))
    return [needed[layer].tolist() if layer in needed else list(every) for layer in range(len(specs) + 1)]


def random_specs(draw: random.Random) -> tuple[list[KVCacheSpec], dict[int, int]]:
    specs = [draw.choice(LAYERS) for _ in range(draw.randint(1, 6))]
    sharing = {}
    for layer, spec in enumerate(specs):
        owners = [other for other in range(layer) if specs[other] == spec and other not in sharing]
        if owners and draw.random() < 0.4:
            sharing[layer] = draw.choice(owners)
    return specs, sharing


@pytest.mark.parametrize("seed", range(60))
def test_layers_take_in_what_something_depends_on_and_no_more(seed):
    """Chunks, decodes, prefix hits, replays and skipped prompts of random stacks."""
    draw = random.Random(seed)
    specs, sharing = random_specs(draw)
    simulation = simulate(
        specs, page_tokens=draw.choice([1, 3, 8]), kv_sharing=sharing, skips_prompts=draw.random() < 0.5,
        retention=RetentionPolicy("tails", draw.choice([None, 24]), spare=False),
    )  # fmt: skip
    layout, manager = simulation.manager.layout, simulation.manager
    schedule, steps = simulation.scheduler.schedule, []

    def checked():
        plan = schedule()
        if plan is not None:
            expected, _ = reached_tokens(plan, layout, specs, manager.inspect().step_pages.first_page)
            actual = taken_in(plan, layout, specs)
            assert actual == [sorted(tokens) for tokens in expected]
            steps.append(sum(len(plan.token_ids) - len(tokens) for tokens in actual))
        return plan

    simulation.scheduler.schedule = checked
    base = [draw.randrange(50) for _ in range(110)]
    for index in range(8):
        shared = draw.choice([0, 40, 77, 100])
        simulation.add(f"r{index}", [*base[:shared], *(draw.randrange(50) for _ in range(draw.randint(1, 20)))], 4)
        for _ in range(draw.randint(0, 4)):
            simulation.step()
    simulation.run()
    assert max(steps) > 0


def first_plan(specs, num_tokens: int, *, kv_sharing=None, **options) -> tuple[StepPlan, KVLayout]:
    simulation = simulate(specs, max_model_len=num_tokens + 8, kv_sharing=kv_sharing, **options)
    simulation.add("r", np.arange(num_tokens) % 50, 4)
    return simulation.scheduler.schedule(), simulation.manager.layout


def test_by_hand():
    """Pages of 4, windows of 9, a chunk of 40: kept from block (36 - 8) / 4 = 7 on, position 28. The last layer's one
    query sees from 31 on; the 12 tokens kept leave the layer below, where 28 sees from 20 on; and so down to 12."""
    specs = [full(), sliding(9), sliding(9), sliding(9)]
    plan, layout = first_plan(specs, 40, page_tokens=4)
    taken = taken_in(plan, layout, specs)
    assert taken == [list(range(40)), *(list(range(first, 40)) for first in (12, 20, 28, 39))]


def test_a_chunk_that_does_not_end_its_prompt_wants_no_output_of_the_last_layer():
    specs = [full(), sliding(9), sliding(9)]
    plan, layout = first_plan(specs, 80, page_tokens=4, chunk_tokens=40)
    assert len(plan.token_ids) == 40
    taken = taken_in(plan, layout, specs)
    assert taken == [list(range(40)), list(range(20, 40)), list(range(28, 40)), []]


def test_decodes_alone_need_all():
    specs = [full(), sliding(9), sliding(9)]
    simulation = simulate(specs)
    for index in range(3):
        simulation.add(f"r{index}", [index] * 5, 4)
    simulation.step()
    plan = simulation.scheduler.schedule()
    assert plan.num_decodes == 3
    assert ReceptiveField(simulation.manager.layout, specs).needed_tokens(plan) == {}


def test_pages_that_stay_take_in_all_but_for_the_last_layer_s_queries():
    """Memory idles: pages are kept whole."""
    specs = [full(), sliding(9), sliding(9)]
    simulation = Simulation(specs, chunk_tokens=60, step_tokens=60)
    simulation.add("r", range(40), 4)
    plan = simulation.scheduler.schedule()
    taken = taken_in(plan, simulation.manager.layout, specs)
    assert taken == [*[list(range(40))] * 3, [39]]


GEMMA_3N_KINDS = ["full" if layer % 5 == 4 else "sliding" for layer in range(35)]
SHAPES = {
    "32 sliding layers": ([sliding(256)] * 32, {}),
    "Gemma 3 27B": ([full() if layer % 6 == 5 else sliding(1024) for layer in range(62)], {}),
    "Gemma 3n E4B": (
        [full() if kind == "full" else sliding(512) for kind in GEMMA_3N_KINDS],
        shared_kv_owners(GEMMA_3N_KINDS, 15),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_outputs", "num_inputs"),
    [
        # Kept from block (8176 - 255) // 16 on, 272 tokens; then 255 more in each layer below.
        ("32 sliding layers", 1 + sum(272 + 255 * k for k in range(31)), sum(272 + 255 * k for k in range(32))),
        # Kept: 1,040 tokens. Layers 61, 60 and 59 (full, so all give K and V) are not computed for all.
        ("Gemma 3 27B", 59 * 8192 + (1040 + 1023) + 1040 + 1, 60 * 8192 + (1040 + 1023) + 1040),
        # Layers 20 to 34 have no KV of their own; 18 and 19, whose KV they read, give it for all that they see. Layer
        # 18 also for 19, which is full.
        ("Gemma 3n E4B", 19 * 8192 + 16, 20 * 8192 + 15),
    ],
)
def test_rows_of_a_prompt_of_8192_tokens(name, num_outputs, num_inputs):
    """The last chunk, or the only one: rows of Q, attention, output projection and MLP; rows of norm, K and V."""
    specs, sharing = SHAPES[name]
    plan, layout = first_plan(specs, 8192, page_tokens=16, chunk_tokens=8192, kv_sharing=sharing)
    assert len(plan.token_ids) == 8192
    taken = taken_in(plan, layout, specs)
    assert sum(map(len, taken[1:])) == num_outputs
    assert sum(map(len, taken[:-1])) == num_inputs
