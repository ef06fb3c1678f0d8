"""What hits and what is given back, through the real scheduler with made-up tokens."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.errors import InvariantError
from lamella.kv_cache import invariants
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.prefix_match import NO_MATCH
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, chunked, commit_row, full, sliding

HYBRID = [full(), sliding(9), sliding(9)]


def run_one(simulation, request_id, prompt, num_tokens=1, salt=None):
    """Run one request to its end; returns (tokens served from cache, output)."""
    request = simulation.add(request_id, prompt, num_tokens, salt)
    simulation.run()
    assert simulation.outputs[request_id] == foretell(salt, prompt, num_tokens)
    return request.num_cached_tokens, simulation.outputs[request_id]


@pytest.mark.parametrize(
    "specs", [HYBRID, [full()], [sliding(9)], [full(), chunked(8)], [full(), sliding(5), sliding(12)]]
)
def test_a_repeated_prompt_recomputes_one_token(specs):
    simulation = Simulation(specs, page_tokens=4)
    prompt = list(range(21))
    assert run_one(simulation, "first", prompt)[0] == 0
    assert run_one(simulation, "again", prompt)[0] == 20


def test_the_next_turn_of_a_chat_hits_all_that_was_computed():
    """21 prompt and 20 generated tokens: the turn that resends them finds all but the last sampled one."""
    simulation = Simulation(HYBRID, page_tokens=4)
    prompt = list(range(21))
    _, answer = run_one(simulation, "first", prompt, 20)
    assert run_one(simulation, "second", [*prompt, *answer, 7, 7, 7])[0] == 40


def test_a_prompt_that_parts_in_the_middle_hits_from_the_second_time_on():
    """The window at the divergence is gone the first time; it is then kept, as others part there too."""
    simulation = Simulation(HYBRID, page_tokens=4)
    system = list(range(24))
    assert run_one(simulation, "a", [*system, *[30] * 20])[0] == 0
    assert run_one(simulation, "b", [*system, *[31] * 20])[0] == 0
    assert run_one(simulation, "c", [*system, *[32] * 20])[0] == 24


def test_a_prompt_that_parts_inside_the_last_block_hits():
    simulation = Simulation(HYBRID, page_tokens=4)
    prompt = list(range(20))
    run_one(simulation, "a", prompt)
    assert run_one(simulation, "b", [*prompt[:18], 40, 41, 42])[0] == 18


def test_salts_share_nothing():
    simulation = Simulation(HYBRID, page_tokens=4)
    prompt = list(range(21))
    run_one(simulation, "a", prompt, salt="x")
    assert run_one(simulation, "b", prompt, salt="y")[0] == 0
    assert run_one(simulation, "c", prompt)[0] == 0
    assert run_one(simulation, "d", prompt, salt="x")[0] == 20


def test_a_long_request_whose_live_pages_fit_flushes_nothing():
    """A's cache survives B, whose window slides over many blocks but holds few at a time."""
    simulation = Simulation(
        [full(), *[sliding(9)] * 5], page_tokens=4, max_model_len=400, extra_slabs=8, chunk_tokens=8
    )
    short = list(range(20))
    run_one(simulation, "a", short)
    run_one(simulation, "b", [45] * 300)
    assert simulation.manager.inspect().tree.num_evicted_resume_points == 0
    assert run_one(simulation, "a again", short)[0] == 19


def test_prefix_caching_off_keeps_nothing():
    simulation = Simulation(HYBRID, page_tokens=4, enable_prefix_caching=False)
    prompt = list(range(21))
    run_one(simulation, "first", prompt)
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
    assert run_one(simulation, "again", prompt)[0] == 0


def test_reset_forgets_what_nobody_uses():
    simulation = Simulation(HYBRID, page_tokens=4)
    prompt = list(range(21))
    run_one(simulation, "first", prompt)
    assert simulation.manager.reset_prefix_cache()
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
    assert run_one(simulation, "again", prompt)[0] == 0
    simulation.add("running", prompt, 30)
    simulation.step()
    simulation.step()
    simulation.manager.reset_prefix_cache()
    invariants.check(simulation.manager)
    simulation.run()
    assert simulation.outputs["running"] == foretell(None, prompt, 30)


@pytest.mark.parametrize("specs", [HYBRID, [full()], [sliding(9)], [full(), chunked(8)]])
def test_requests_that_do_not_fit_together_preempt_and_all_finish_right(specs):
    simulation = Simulation(specs, page_tokens=4, extra_slabs=1, max_num_seqs=3)
    prompts = {f"r{i}": [i, *range(12)] for i in range(6)}
    for request_id, prompt in prompts.items():
        simulation.add(request_id, prompt, 40)
    simulation.run()
    for request_id, prompt in prompts.items():
        assert simulation.outputs[request_id] == foretell(None, prompt, 40)
    if specs != [sliding(9)]:
        assert simulation.scheduler.counters().num_preemptions > 0
    assert all(usage.owned == 0 for usage in simulation.manager.usage().values())


def test_a_preempted_request_resumes_from_its_own_cache():
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=2)
    request = simulation.add("r", range(20), 30)
    for _ in range(6):
        simulation.step()
    computed = int(simulation.scheduler.rows.num_computed[request.row])
    simulation.scheduler._preempt(request.row)
    invariants.check(simulation.manager)
    assert simulation.manager.match(request.token_ids).num_tokens == computed
    simulation.run()
    assert simulation.outputs["r"] == foretell(None, range(20), 30)
    assert simulation.scheduler.counters().num_cached_tokens == 0, "a resume is no hit"


def test_a_failed_step_is_undone_copy_on_write_included():
    simulation = Simulation(HYBRID, page_tokens=4)
    run_one(simulation, "first", range(22))
    request = simulation.add("second", [*range(18), 40, 41, 42], 10)
    simulation.step(fail=True)
    assert request.num_cached_tokens == 18
    assert not simulation.manager.inspect().supply.copies
    simulation.run()
    assert simulation.outputs["second"] == foretell(None, [*range(18), 40, 41, 42], 10)


def test_abort_while_waiting_prefilling_and_decoding():
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=2, chunk_tokens=8)
    for request_id in ("decoding", "prefilling", "waiting"):
        simulation.add(request_id, [len(request_id), *range(20)], 20)
        simulation.step()
        simulation.step()
    for request_id in ("waiting", "prefilling", "decoding"):
        simulation.finish(request_id)
    assert not simulation.scheduler.has_requests
    assert all(usage.owned == 0 for usage in simulation.manager.usage().values())


def break_lock(manager, row):
    node = int(manager.inspect().rows.frontier[row])
    manager.inspect().tree.refs[0, node] -= 1


def break_table(manager, row):
    manager.inspect().rows.pages[0, row, 0] = manager.inspect().rows.pages[0, row, 1]


def break_slide(manager, row):
    manager.inspect().rows.first_kept[1, row] += 1


def break_count(manager, row):
    manager.inspect().supply.num_owned[1] += 1


def break_hold(manager, row):
    manager.inspect().tree.holds[1, int(manager.inspect().rows.frontier[row])] += 1


def break_leak(manager, row):
    manager.inspect().arena.allocate(0, 1)


@pytest.mark.parametrize("fault", [break_lock, break_table, break_slide, break_count, break_hold, break_leak])
def test_the_invariant_checker_sees_each_kind_of_fault(fault):
    simulation = Simulation(HYBRID, page_tokens=4)
    request = simulation.add("r", range(20), 30)
    for _ in range(5):
        simulation.step()
    fault(simulation.manager, request.row)
    with pytest.raises(InvariantError):
        invariants.check(simulation.manager)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 17])
def test_a_prompt_resent_after_any_answer_hits_to_the_token(length, num_tokens):
    """Also where the prompt ends inside a block, whose window has slid away during the answer."""
    simulation = Simulation(HYBRID, page_tokens=8)
    prompt = list(range(length))
    run_one(simulation, "first", prompt, num_tokens)
    assert run_one(simulation, "again", prompt, num_tokens)[0] == length - 1
    assert run_one(simulation, "parted", [*prompt[:-1], 49, 48])[0] == length - 1


@pytest.mark.parametrize("specs", [HYBRID, [full()], [sliding(9)], [full(), chunked(8)]])
def test_requests_of_one_step_share_what_the_first_is_about_to_compute(specs):
    """Six equal prompts at once: one computes the whole blocks, the others only what lies beyond them."""
    simulation = Simulation(specs, page_tokens=4, chunk_tokens=64, max_num_seqs=8, extra_slabs=2000)
    prompt = list(range(23))
    requests = [simulation.add(f"r{index}", [*prompt, 40 + index], 9) for index in range(6)]
    simulation.step()
    assert simulation.scheduler.counters().num_steps == 1
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20, 20, 20]
    simulation.run()
    for index in range(6):
        assert simulation.outputs[f"r{index}"] == foretell(None, [*prompt, 40 + index], 9)


def test_when_a_shared_step_fails_nobody_keeps_what_was_never_computed():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=64, max_num_seqs=8, extra_slabs=2000)
    prompt = list(range(23))
    for index in range(4):
        simulation.add(f"r{index}", [*prompt, 40 + index], 9)
    simulation.step(fail=True)
    assert list(simulation.manager.inspect().tree.nodes()) == []
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
    simulation.run()
    for index in range(4):
        assert simulation.outputs[f"r{index}"] == foretell(None, [*prompt, 40 + index], 9)


def test_a_failed_chunk_keeps_what_earlier_chunks_computed():
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=10)
    request = simulation.add("r", range(30), 5)
    simulation.step()
    simulation.step(fail=True)
    assert simulation.manager.match(request.token_ids).num_tokens == 8, "ten tokens, of which two whole blocks"
    simulation.run()
    assert simulation.outputs["r"] == foretell(None, range(30), 5)


@pytest.mark.parametrize("known", [0, 3, 7])
@pytest.mark.parametrize("retention", ["tails", "all"])
def test_blocks_committed_at_once_are_what_one_at_a_time_gets(known, retention):
    """37 tokens of which the cache has the first `known` blocks: same hits at every length, same pages in use."""
    token_ids = np.arange(37, dtype=np.int32)
    managers = []
    for ends in ([37], range(1, 38)):
        manager = BlockManager(
            build_layout(HYBRID, page_tokens=4), num_slabs=200, num_rows=2, max_model_len=60, interval_tokens=4,
            retention=RetentionPolicy(retention),
        )  # fmt: skip
        for row, num_tokens in enumerate([4 * known, 37]):
            manager.begin(row, NO_MATCH)  # as if both had started before either was known
            assert manager.grow(row, 0, num_tokens, is_prefill=True)
        commit_row(manager, 0, token_ids, 4 * known)
        for end in ends:
            commit_row(manager, 1, token_ids, end, ends_prompt=end == 37)
        invariants.check(manager)
        managers.append(manager)
    at_once, one_by_one = managers
    tables = [manager.inspect().rows for manager in managers]
    assert tables[0].pages.tolist() == tables[1].pages.tolist()
    assert tables[0].nodes.tolist() == tables[1].nodes.tolist()
    for row in range(2):
        for manager in managers:
            manager.release(row, token_ids, [4 * known, 37][row])
    for length in range(2, 38):
        assert at_once.match(token_ids[:length]) == one_by_one.match(token_ids[:length])
    assert at_once.usage() == one_by_one.usage()
    assert at_once.match(token_ids).num_tokens == 36
