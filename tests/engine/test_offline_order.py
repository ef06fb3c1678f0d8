"""Shuffled prompts by prefix against the same prompts sorted, first come, first served, in the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.waiting_order import MAX_WAIT_STEPS
from tests.helpers.offline import Mix, Prompt, add_all, drain, hit_share, mix_of, one_step, request_of
from tests.helpers.simulation import full, sliding


def groups(num_groups: int, num_members: int, *, windows: bool = False, memory_prompts: int = 12) -> Mix:
    """Prompts of 96 tokens of which a group's members share 88."""
    rng = np.random.default_rng(num_groups)
    prompts = []
    for _ in range(num_groups):
        prefix = rng.integers(0, 200_000, 88)
        members = [np.concatenate([prefix, rng.integers(0, 200_000, 8)]) for _ in range(num_members)]
        prompts += [Prompt(member.astype(np.int32)) for member in members]
    specs = [full(), sliding(33)] if windows else [full()]
    return Mix(prompts, specs, 16, memory_prompts * 112, 16, 1024, 4)


def holds(mix: Mix, seed: int) -> bool:
    sorted_share = hit_share(mix, "fcfs", mix.prompts)
    return hit_share(mix, "prefix", mix.shuffled(seed)) >= 0.98 * sorted_share > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shuffled_queue_finds_what_a_sorted_one_finds(seed):
    assert holds(mix_of(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_mixes_find_what_they_find_sorted(seed):
    assert holds(mix_of(seed), seed)


@pytest.mark.parametrize(("num_groups", "num_members"), [(300, 4), (60, 12)])
def test_every_prefix_is_computed_once(num_groups, num_members):
    """Memory for about a dozen prompts, and more groups than were ever compared. All but the first of a group find the
    group's prefix, in whole blocks at least: 80 of 88 tokens."""
    mix = groups(num_groups, num_members)
    scheduler = mix.scheduler("prefix")
    requests = add_all(scheduler, mix.shuffled(0), mix.num_output_tokens)
    drain(scheduler)
    found = sorted(request.num_cached_tokens for request in requests)
    assert found[:num_groups] == [0] * num_groups
    assert found[num_groups] >= 80
    assert scheduler.counters().num_preemptions == 0


def test_the_place_where_waiting_prompts_part_is_kept_before_the_second_comes():
    """With windows, one at a time: the second of a group finds all that the first shares with it, to the token."""
    mix = groups(10, 3, windows=True)._replace(max_num_seqs=1)
    scheduler = mix.scheduler("prefix")
    requests = add_all(scheduler, mix.shuffled(0), mix.num_output_tokens)
    drain(scheduler)
    assert sorted(request.num_cached_tokens for request in requests) == [0] * 10 + [88] * 20


@pytest.mark.slow
def test_prompts_of_one_call_do_not_age_against_each_other():
    """A queue that takes more than MAX_WAIT_STEPS is visited branch by branch to its end."""
    mix = groups(80, 4)._replace(max_num_seqs=1, num_output_tokens=9)
    scheduler = mix.scheduler("prefix")
    requests = add_all(scheduler, mix.shuffled(0), mix.num_output_tokens)
    drain(scheduler)
    assert scheduler.counters().num_steps > 1.4 * MAX_WAIT_STEPS
    found = sorted(request.num_cached_tokens for request in requests)
    assert found == [0] * 80 + [88] * 240


def test_what_an_earlier_call_left_is_used_before_it_is_evicted():
    """A group that is cached runs first, though it came last."""
    mix = groups(40, 4)
    scheduler = mix.scheduler("prefix")
    add_all(scheduler, mix.prompts[-4:-3], 1)
    drain(scheduler)
    requests = add_all(scheduler, mix.prompts, mix.num_output_tokens)
    drain(scheduler)
    first = sorted(requests, key=lambda request: request.admission_index)[:4]
    assert {id(request) for request in first} == {id(request) for request in requests[-4:]}
    assert min(request.num_cached_tokens for request in requests[-4:]) >= 80


def test_a_later_arrival_joins_those_it_shares_with():
    """It comes while others of its group wait, and starts with them, not behind 30 groups."""
    mix = groups(30, 3)._replace(max_num_seqs=1)
    scheduler = mix.scheduler("prefix")
    add_all(scheduler, mix.prompts, mix.num_output_tokens)
    one_step(scheduler)
    running = scheduler.rows.request(scheduler.running[0])
    shared = running.token_ids[:88]
    late = request_of("late", Prompt(np.concatenate([shared, [7, 7, 7]]).astype(np.int32)), 1)
    scheduler.add(late)
    drain(scheduler)
    assert late.admission_index <= 3
    assert late.num_cached_tokens == 88


def test_later_arrivals_overtake_for_so_many_steps_and_no_longer():
    """One runs at a time, for 9 steps. A prompt that shares nothing waits while later ones, whose prefix is cached,
    keep coming: they overtake it, the last of them no later than MAX_WAIT_STEPS after it came."""
    mix = groups(1, 2)._replace(max_num_seqs=1)
    scheduler = mix.scheduler("prefix")
    prefix = mix.prompts[0].token_ids[:88]
    add_all(scheduler, mix.prompts[:1], 9)
    one_step(scheduler)
    loner, came = request_of("loner", Prompt(np.arange(96, dtype=np.int32)), 1), scheduler.counters().num_steps
    scheduler.add(loner)
    late: list[Request] = []
    overtaken = []
    while loner.admission_index < 0:
        if len(scheduler.queue) < 3:
            suffix = np.full(8, len(late), dtype=np.int32)
            late.append(request_of(f"late {len(late)}", Prompt(np.concatenate([prefix, suffix])), 9))
            scheduler.add(late[-1])
        num_waiting, step = len(scheduler.queue), scheduler.counters().num_steps
        one_step(scheduler)
        if len(scheduler.queue) < num_waiting and loner.admission_index < 0:
            overtaken.append(step - came)
    assert overtaken[0] <= 9
    assert MAX_WAIT_STEPS - 9 <= overtaken[-1] < MAX_WAIT_STEPS
    assert scheduler.counters().num_steps - came <= MAX_WAIT_STEPS + 9
