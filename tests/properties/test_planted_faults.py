"""The tests are tested: with any one rule of the real code broken, a fixed battery of scenarios fails.

The battery is what the other tests of the KV cache do in small: outputs told from the prompt alone, tags on
every key that is read, the invariants after every step, and hits and pages counted by hand.
"""

from __future__ import annotations

import random

import pytest

from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.fake_executor import foretell
from tests.helpers.planted_faults import FAULTS
from tests.helpers.planted_faults.battery import LAYERS, NOTICED, drain
from tests.helpers.serving import run_all, serve
from tests.helpers.simulation import Simulation, chunked, full, sliding
from tests.helpers.table_watch import watch_tables
from tests.kv_cache import (
    test_expectations,
    test_kept_ends,
    test_left_for_ends,
    test_moves,
    test_passed_resume_points,
    test_spare,
    test_step_pages,
)
from tests.model_executor import test_page_moves

HYBRID = [full(), sliding(9), sliding(9)]
LAYOUTS = [HYBRID, [full()], [sliding(9)], [full(), chunked(8)], [full(2), sliding(5), sliding(12)]]
PROMPT = list(range(21))


def hits_are_exact_to_the_token(specs):
    simulation = Simulation(specs, page_tokens=4)
    assert serve(simulation, PROMPT, 22) == 0
    assert serve(simulation, PROMPT, 22) == 20
    answer = foretell(None, PROMPT, 22)
    assert serve(simulation, [*PROMPT, *answer, 48, 49], 3) == 42, "the next turn of a chat"
    assert serve(simulation, [*PROMPT[:19], 48, 49, 47]) == 19, "parted inside the block before the last"
    assert simulation.manager.inspect().tree.num_evicted_resume_points == 0
    drain(simulation)


def a_prompt_that_ends_with_a_block_keeps_one_more():
    """Resends that part anywhere in the last block find all that is common."""
    for shared in (17, 18, 19, 16):
        simulation = Simulation(HYBRID, page_tokens=4)
        assert serve(simulation, PROMPT[:20]) == 0
        assert serve(simulation, [*PROMPT[:shared], *[40] * 9]) == shared


def the_end_of_a_prompt_outlives_a_long_answer():
    simulation = Simulation(HYBRID, page_tokens=4)
    assert serve(simulation, PROMPT, 30) == 0
    assert serve(simulation, [*PROMPT[:20], 40, 41, 42]) == 20


def equal_blocks_after_different_ones_are_different():
    simulation = Simulation(HYBRID, page_tokens=4)
    assert serve(simulation, [1, 1, 1, 1, *PROMPT]) == 0
    assert serve(simulation, [2, 2, 2, 2, *PROMPT]) == 0
    assert serve(simulation, [1, 1, 1, 1, 1, 1, 1, 1, *PROMPT]) == 0, "the window at 4 is not kept"
    assert serve(simulation, [2, 2, 2, 2, *PROMPT]) == 24
    drain(simulation)


def where_prompts_part_is_kept_from_the_second_on():
    simulation = Simulation(HYBRID, page_tokens=4)
    hits = [serve(simulation, [*range(24), *[30 + index] * 20]) for index in range(4)]
    assert hits == [0, 0, 24, 24]


def tenants_share_nothing():
    simulation = Simulation(HYBRID, page_tokens=4)
    assert [serve(simulation, PROMPT, salt=salt) for salt in ("x", "y", None, "x")] == [0, 0, 0, 20]


def requests_of_one_step_share_whole_blocks():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=128, extra_slabs=4000, max_num_seqs=8)
    prompts = [[*range(22), 40 + index, 39] for index in range(4)]
    requests = [simulation.add(f"r{index}", prompt, 9) for index, prompt in enumerate(prompts)]
    simulation.step()
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20]
    run_all(simulation)
    for index, prompt in enumerate(prompts):
        assert simulation.outputs[f"r{index}"] == foretell(None, prompt, 9)
    drain(simulation)


def a_failed_step_leaves_nothing():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=128, extra_slabs=4000, max_num_seqs=8)
    assert serve(simulation, PROMPT) == 0
    num_nodes = len(list(simulation.manager.inspect().tree.nodes()))
    prompts = [[*range(18), 40, 41, 42, 43, 44, 45 + index, 46] for index in range(3)]  # with a copy, and shared blocks
    for index, prompt in enumerate(prompts):
        simulation.add(f"f{index}", prompt, 5)
    simulation.step(fail=True)
    assert len(list(simulation.manager.inspect().tree.nodes())) == num_nodes
    assert not simulation.manager.inspect().supply.copies
    for index in range(3):
        simulation.finish(f"f{index}")
    assert [serve(simulation, prompt, 5) for prompt in prompts] == [18, 23, 23]
    drain(simulation)


def a_failed_chunk_keeps_the_chunks_before():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=10)
    simulation.add("r", range(30), 5)
    simulation.step()
    simulation.step(fail=True)
    simulation.finish("r")
    assert serve(simulation, range(30), 5) == 8


def a_window_holds_its_pages_and_no_more():
    """W 9, pages of 4: decode at position p >= 8 needs the blocks from p // 4 - 2 on, which are 3. An interval of 12
    lets a window lag by up to two blocks more."""
    for interval, expected in ((4, [3] * 24), (12, [3] * 4 + [4] * 4 + [5] * 4)):
        simulation = Simulation([full(), sliding(9)], page_tokens=4, interval_tokens=interval)
        simulation.add("r", range(12), 40)
        simulation.step()
        held = []
        for _ in range(24):
            simulation.step()
            held.append(simulation.manager.usage()["sliding_9"].owned)
        assert held == (expected * 2)[:24]
        run_all(simulation)
        assert simulation.outputs["r"] == foretell(None, range(12), 40)


def a_tombstone_comes_back_to_life():
    """A decodes far beyond its prompt, whose window is evicted. B recomputes the prompt, C finds what B gave."""
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=3)
    simulation.add("a", PROMPT, 40)
    for _ in range(34):
        simulation.step()
    while simulation.manager.inspect().tree.evict_one():
        pass
    assert simulation.manager.inspect().tree.num_tombstones > 0
    simulation.add("b", [*PROMPT, 40], 12)
    for _ in range(6):
        simulation.step()
    requests = [simulation.add("c", [*PROMPT, 40], 12)]
    for _ in range(2):
        simulation.step()
    while simulation.manager.inspect().tree.evict_one():
        pass
    for _ in range(2):
        simulation.step()
    simulation.finish("a")
    run_all(simulation)
    assert simulation.outputs["b"] == simulation.outputs["c"] == foretell(None, [*PROMPT, 40], 12)
    assert requests[0].num_cached_tokens == 21
    assert serve(simulation, [*PROMPT, 40, *foretell(None, [*PROMPT, 40], 12), 41]) == 33
    drain(simulation)


def a_preempted_request_resumes_where_it_was():
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=2)
    request = simulation.add("r", range(20), 30)
    for _ in range(6):
        simulation.step()
    computed = int(simulation.scheduler.rows.num_computed[request.row])
    simulation.scheduler._preempt(request.row)
    assert simulation.manager.match(request.token_ids).num_tokens == computed
    run_all(simulation)
    assert simulation.outputs["r"] == foretell(None, range(20), 30)
    assert simulation.scheduler.counters().num_cached_tokens == 0, "a resume is no hit"
    drain(simulation)


def requests_that_do_not_fit_wait():
    """Two prompts of 40 tokens in an arena of 19 pages: the second waits, for no running one is worth less."""
    simulation = Simulation([full()], page_tokens=4, extra_slabs=3)
    for index in range(2):
        simulation.add(f"r{index}", [index, *range(39)], 4)
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0
    for index in range(2):
        assert simulation.outputs[f"r{index}"] == foretell(None, [index, *range(39)], 4)


def what_was_used_last_stays():
    """Room for some six prompts of 21 tokens: A, used between all the others, is never lost; B is."""
    simulation = Simulation([full(), sliding(9)], page_tokens=4, max_model_len=32, extra_slabs=50)
    prompts = [[index, *range(20)] for index in range(13)]
    hits = []
    for prompt in prompts[1:]:
        hits.append(serve(simulation, prompts[0]))
        assert serve(simulation, prompt) == 0
    assert hits == [0, *[20] * 11]
    assert serve(simulation, prompts[1]) == 0
    assert serve(simulation, prompts[12]) == 20


def a_hit_that_nobody_foresaw_refreshes():
    """The third request was queued when nothing was cached, so it expected nothing: that it parted at the end of the
    first prompt is what keeps that longer than the second. The end of the first answer is older than both."""
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=1)
    prompts = [[first, *range(19)] for first in (40, 41)]
    for index, (prompt, num_tokens) in enumerate(((prompts[0], 8), (prompts[1], 1), ([*prompts[0], *[49] * 8], 1))):
        simulation.add(f"r{index}", prompt, num_tokens)
    run_all(simulation)
    assert simulation.requests["r2"].num_cached_tokens == 20
    for _ in range(2):
        simulation.manager.inspect().tree.evict_one()
    assert serve(simulation, [*prompts[0], 48]) == 20
    assert serve(simulation, [*prompts[1], 48]) == 0


def a_system_prompt_stays_while_it_is_used():
    simulation = Simulation([full(), sliding(9)], page_tokens=4, max_model_len=48, extra_slabs=30)
    hits = [serve(simulation, [*range(24), *[index] * 8]) for index in range(25, 45)]
    assert hits == [0, 0, *[24] * 18]
    assert simulation.manager.inspect().tree.num_evicted_resume_points > 5


def what_a_row_found_is_left_for_its_end():
    """The place to resume that it was found at is evicted meanwhile."""
    simulation = Simulation(HYBRID, page_tokens=4, retention=RetentionPolicy(spare=False))
    assert serve(simulation, PROMPT) == 0
    simulation.add("again", [*PROMPT[:20], 48], 9)
    simulation.step()
    assert simulation.requests["again"].num_cached_tokens == 20
    while simulation.manager.inspect().tree.evict_one():
        pass
    simulation.finish("again")
    assert serve(simulation, [*PROMPT[:17], 40, 41]) == 17


def a_place_to_resume_that_goes_takes_no_page_from_a_reader():
    parts = make_parts(HYBRID)
    occupy(parts, 0, 16)
    parts.commits.commit(0, tokens_of(16), 16, ends_prompt=True)
    nodes = parts.rows.nodes[0, :4]
    assert parts.tree.holds[1, nodes].any()
    parts.tree.drop_resume_point(int(nodes[-1]))
    assert not parts.tree.holds[1, nodes].any()
    assert parts.tree.page[1, nodes].tolist() == parts.rows.pages[1, 0, :4].tolist()


SCENARIOS = [
    *[lambda specs=specs: hits_are_exact_to_the_token(specs) for specs in LAYOUTS],
    a_prompt_that_ends_with_a_block_keeps_one_more,
    the_end_of_a_prompt_outlives_a_long_answer,
    equal_blocks_after_different_ones_are_different,
    where_prompts_part_is_kept_from_the_second_on,
    tenants_share_nothing,
    requests_of_one_step_share_whole_blocks,
    a_failed_step_leaves_nothing,
    a_failed_chunk_keeps_the_chunks_before,
    a_window_holds_its_pages_and_no_more,
    a_tombstone_comes_back_to_life,
    a_preempted_request_resumes_where_it_was,
    requests_that_do_not_fit_wait,
    what_was_used_last_stays,
    a_hit_that_nobody_foresaw_refreshes,
    a_system_prompt_stays_while_it_is_used,
    what_a_row_found_is_left_for_its_end,
    a_place_to_resume_that_goes_takes_no_page_from_a_reader,
    lambda: test_left_for_ends.test_they_go_after_spare_pages_and_before_resume_points(9, True),
    lambda: test_kept_ends.check(test_kept_ends.Case([full(), sliding(16)], 4, 3, 23)),
    test_expectations.test_what_is_expected_goes_last_and_of_that_what_is_needed_first,
    test_expectations.test_who_waits_no_more_keeps_nothing,
    test_expectations.test_a_preempted_request_expects_what_it_left_behind_before_all_others,
    test_expectations.test_with_the_prefix_policy_the_longest_runs_first,
    *[
        lambda end=end: test_expectations.test_a_request_that_leaves_the_queue_expects_nothing(end)
        for end in ("admitted", "aborted")
    ],
    test_expectations.test_a_failed_step_lets_its_requests_expect_what_is_computed,
    test_spare.test_what_slid_out_is_spare_and_found_again,
    test_spare.test_spare_pages_go_first_and_take_no_resume_point_with_them,
    test_spare.test_pages_that_a_request_uses_are_not_spare,
    test_spare.test_pages_that_a_resume_point_holds_are_not_spare,
    test_passed_resume_points.test_an_answer_does_not_pass_its_own_prompt,
    test_passed_resume_points.test_the_next_turn_passes_the_turn_before,
    test_passed_resume_points.test_a_place_where_prompts_part_is_not_passed,
    test_moves.test_a_slab_comes_free_for_another_group,
    test_moves.test_the_target_of_a_copy_stays_while_other_pages_move,
    test_page_moves.test_moves_run_in_their_order_and_copies_after_them,
    test_step_pages.TestWhichBlocks().test_a_second_chunk_gives_none_for_blocks_that_are_there,
    test_step_pages.TestWhichBlocks().test_where_prompts_parted_a_window_stays_too,
    test_step_pages.TestWhichBlocks().test_what_the_region_does_not_hold_gets_pages,
    test_step_pages.TestWhichBlocks().test_memory_that_is_not_to_be_had_takes_no_step_pages,
    test_step_pages.TestWhichBlocks().test_two_requests_of_a_step_have_different_ones,
    test_step_pages.TestNobodys().test_the_region_is_free_again_after_the_step,
    test_step_pages.TestNobodys().test_the_tree_has_tombstones,
    test_step_pages.test_prompts_are_found_again_where_they_end_and_where_they_part,
    test_step_pages.test_a_preempted_prefill_resumes_where_it_was,
    lambda: test_step_pages.test_tight_memory_gives_what_the_prompts_foretell(1, *test_step_pages.READ_LATER, True),
    *[lambda seed=seed: test_moves.life(seed, num_failing=3) for seed in range(100, 104)],
    lambda: test_moves.life(6),  # where a copy's target is in the slab that were the least to move
]

MAX_MODEL_LEN = 60


def random_life(seed, *, with_step_pages=False):
    """A random model under memory pressure, and random requests that share prefixes."""
    draw = random.Random(seed)
    specs = [draw.choice(LAYERS) for _ in range(draw.randint(1, 4))]
    first = specs.index(specs[-1])
    options = {"step_tokens": 40, "never_idle": True} if with_step_pages else {}
    if with_step_pages and first < len(specs) - 1:
        options["kv_sharing"] = {len(specs) - 1: first}
    simulation = Simulation(
        specs,
        page_tokens=draw.choice([1, 3, 4, 16]),
        max_model_len=MAX_MODEL_LEN,
        extra_slabs=draw.choice([0, 2, 8, 60]),
        chunk_tokens=draw.choice([4, 7, 40]),
        max_num_seqs=draw.choice([1, 3]),
        interval_tokens=draw.choice([None, 6]),
        scheduling_policy=draw.choice(["fcfs", "prefix"]),
        retention=RetentionPolicy(*draw.choice([("tails", None), ("tails", 10), ("all", None)])),
        **options,
    )
    watch_tables(simulation)
    expected = {}
    for _ in range(10):
        base = draw.choice([7, 11])
        prompt = [(base * position) % 50 for position in range(draw.randint(0, 34))]
        prompt += [draw.randrange(50) for _ in range(draw.randint(1, 3))]
        if expected and draw.random() < 0.4:  # a next turn
            earlier, answer, salt = expected[draw.choice(list(expected))]
            prompt = [*earlier, *answer, 9][: MAX_MODEL_LEN - 12]
        else:
            salt = draw.choice([None, None, "tenant"])
        request_id = f"r{len(expected)}"
        num_tokens = draw.randint(1, 10)
        simulation.add(request_id, prompt, num_tokens, salt)
        expected[request_id] = prompt, foretell(salt, prompt, num_tokens), salt
        for _ in range(draw.randint(0, 6)):
            simulation.step(fail=draw.random() < 0.1)
        running = simulation.scheduler.running
        if running and draw.random() < 0.2:
            simulation.scheduler._preempt(running[-1])
        elif draw.random() < 0.1:
            simulation.manager.inspect().tree.evict_one()
    run_all(simulation)
    for request_id, (_, answer, _) in expected.items():
        assert simulation.outputs[request_id] == answer
    drain(simulation)


def battery():
    for scenario in SCENARIOS:
        scenario()
    for seed in range(60):
        random_life(seed)
    for seed in range(60, 80):
        random_life(seed, with_step_pages=True)


def test_the_battery_passes_with_no_fault():
    battery()


# By default every third: what they prove changes with the battery alone.
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] if index % 3 else []) for index, name in enumerate(FAULTS)]
)
def test_a_planted_fault_is_noticed(fault):
    with FAULTS[fault](), pytest.raises(NOTICED):
        battery()
