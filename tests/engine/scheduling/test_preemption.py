"""Which running request is preempted for another."""

from __future__ import annotations

import random

import pytest

from lamella.engine.scheduling.preemption import choose_victim
from lamella.kv_cache import invariants
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9)]


def after_prefill(prompts, specs=HYBRID):
    """All prompts admitted and computed in one step: pages of 4 tokens, no lack of memory."""
    simulation = Simulation(specs, page_tokens=4, chunk_tokens=128, max_num_seqs=len(prompts))
    for name, prompt in prompts.items():
        simulation.add(name, prompt, 30)
    simulation.step()
    assert len(simulation.scheduler.running) == len(prompts)
    return simulation


def victim(simulation):
    scheduler = simulation.scheduler
    row = choose_victim(simulation.manager, scheduler.rows, scheduler.running)
    return scheduler.rows.request(row).request_id


def at_stake(simulation, name):
    row = simulation.requests[name].row
    return simulation.manager.stake(row, int(simulation.scheduler.rows.num_computed[row])).num_tokens


def other_tokens(first, count):
    return [first] * count


@pytest.mark.parametrize("specs", [HYBRID, [full()], [sliding(9)]])
def test_the_one_with_fewest_tokens_leaves_but_never_the_oldest(specs):
    prompts = {
        name: other_tokens(10 + i, count) for i, (name, count) in enumerate(zip("abcd", (8, 12, 24, 20), strict=True))
    }
    simulation = after_prefill(prompts, specs)
    assert [at_stake(simulation, name) for name in prompts] == [8, 12, 24, 20]
    assert victim(simulation) == "b"


def test_tokens_that_another_request_keeps_are_not_lost():
    prompts = {
        "a": other_tokens(10, 8),
        "b": other_tokens(11, 12),
        "c": [*range(20, 42)],
        "d": [*range(20, 40), 1, 2, 3],
    }
    simulation = after_prefill(prompts)  # c and d share 5 blocks
    assert [at_stake(simulation, name) for name in prompts] == [8, 12, 2, 3]
    assert victim(simulation) == "c"


def test_of_equals_the_youngest_leaves():
    simulation = after_prefill({name: other_tokens(10 + i, 12) for i, name in enumerate("abcd")})
    assert victim(simulation) == "d"


def test_one_that_shares_all_its_pages_makes_no_room():
    twins = [*range(20, 44)]  # 6 whole blocks
    simulation = after_prefill({"a": other_tokens(10, 8), "b": other_tokens(11, 40), "c": twins, "d": twins}, [full()])
    assert [at_stake(simulation, name) for name in "cd"] == [0, 0]
    assert victim(simulation) == "b"
    simulation.finish("b")
    assert victim(simulation) == "d", "where none makes room alone, the twins do one after the other"


def test_a_preempted_request_keeps_its_age():
    """b is older than c, though it runs again only after it; it has least to lose, and still c leaves."""
    simulation = after_prefill({"a": other_tokens(10, 8), "b": other_tokens(11, 4), "c": other_tokens(12, 30)})
    simulation.scheduler._preempt(simulation.requests["b"].row)
    simulation.step()
    running = [simulation.scheduler.rows.request(row).request_id for row in simulation.scheduler.running]
    assert running == ["a", "c", "b"]
    assert victim(simulation) == "b"
    simulation.finish("a")
    assert victim(simulation) == "c"
    simulation.run()
    assert simulation.requests["b"].num_preemptions == 1


def test_an_older_request_with_less_to_lose_leaves_for_a_younger_one():
    """One group, a page to a slab, 20 of them. After the prompts a holds 8, b 2, c 9; a and c need 9 and 11 to end. The
    youngest, c, has 36 tokens to lose, b has 8."""
    simulation = Simulation([full()], page_tokens=4, max_model_len=64, extra_slabs=4, chunk_tokens=128, max_num_seqs=3)
    assert simulation.manager.inspect().arena.num_slabs - 1 == 20
    wanted = {"a": (other_tokens(10, 30), 4), "b": (other_tokens(11, 7), 20), "c": (other_tokens(12, 36), 6)}
    for name, (prompt, num_tokens) in wanted.items():
        simulation.add(name, prompt, num_tokens)
    simulation.run()
    assert simulation.outputs == {name: foretell(None, *request) for name, request in wanted.items()}
    preempted = {name: request.num_preemptions for name, request in simulation.requests.items()}
    assert preempted["a"] == preempted["c"] == 0
    assert preempted["b"] >= 1


def test_one_that_is_planned_already_can_be_the_victim():
    """`old` was preempted once, so it is planned after `young`, which takes the last free pages for its chunk; the
    blocks that the chunk would complete are in the tree by then, and have to go again."""
    simulation = Simulation([full()], page_tokens=4, chunk_tokens=64, max_num_seqs=2)
    scheduler, manager = simulation.scheduler, simulation.manager
    scheduler.chunk_tokens = 6  # the chunk ends inside a block
    prompts = {"old": other_tokens(10, 30), "young": other_tokens(11, 30)}
    for name, prompt in prompts.items():
        simulation.add(name, prompt, 5)
    simulation.step()
    old, young = (simulation.requests[name].row for name in prompts)
    assert scheduler.rows.num_computed[[old, young]].tolist() == [6, 6]
    scheduler.running.reverse()
    arena = manager.inspect().arena
    hoard = arena.allocate(0, arena.num_allocatable(0) - 1)  # one page is left: tokens 8 to 11 of the first to ask
    plan = scheduler.schedule()
    assert scheduler.running == [old]
    assert simulation.requests["young"].num_preemptions == 1
    assert plan.seq_lens.tolist() == [12]
    assert manager.inspect().rows.num_committed[young] == 0
    contexts = [(None, scheduler.rows.tokens[old, : scheduler.rows.num_tokens[old]].tolist())]
    scheduler.update(simulation.executor.execute(plan, contexts))
    for page in hoard:
        arena.free(0, page)
    invariants.check(manager)
    simulation.run()
    assert simulation.outputs == {name: foretell(None, prompt, 5) for name, prompt in prompts.items()}


@pytest.mark.parametrize("specs", [HYBRID, [full()], [full(), sliding(9, heads=3)]])
def test_whatever_is_preempted_all_finish_right(specs):
    """More demand than memory, for requests that share prefixes and are pushed out at random besides."""
    num_preemptions = 0
    for seed in range(6):
        choice = random.Random(seed)
        simulation = Simulation(specs, page_tokens=4, extra_slabs=choice.randint(0, 4), chunk_tokens=8, max_num_seqs=4)
        simulation.scheduler.max_num_batched_tokens = 32  # several prefills in a step
        expected = {}
        for i in range(7):
            prompt = [*range(choice.choice([0, 8, 11])), *(choice.randrange(50) for _ in range(choice.randint(1, 20)))]
            simulation.add(f"r{i}", prompt, 30)
            expected[f"r{i}"] = foretell(None, prompt, 30)
        for _ in range(40):
            simulation.step()
            if simulation.scheduler.running and choice.random() < 0.2:
                simulation.scheduler._preempt(choice.choice(simulation.scheduler.running))
        simulation.run(2000)
        assert simulation.outputs == expected
        num_preemptions += simulation.scheduler.counters().num_preemptions
    assert num_preemptions > 50
