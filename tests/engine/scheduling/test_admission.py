"""Whether a waiting request starts: cases on both sides of each threshold, by hand."""

from __future__ import annotations

from unittest import mock

import pytest

from lamella.engine.scheduling import admission as admission_module
from lamella.engine.scheduling.admission import Admission
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.expectations import Expectation, Expectations
from lamella.kv_cache.prefix_match import PrefixMatch
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import arena_of, run_all, serve
from tests.helpers.simulation import Simulation, full, sliding

NO_MATCH = PrefixMatch(0, [], NO_NODE, 0)


def expecting(simulation: Simulation, *, num_tokens: int, num_bytes: int = 0, num_nodes: int = 1) -> Admission:
    """The simulation's admission where `num_nodes` waiting requests expect a prefix each."""
    expected = simulation.manager.inspect().tree.expected = Expectations()
    for node in range(100, 100 + num_nodes):
        expected.add(Expectation(node, node, num_tokens, num_bytes))
    return simulation.scheduler._admission


@pytest.fixture(autouse=True)
def step_cost(monkeypatch):
    """A round number to work with by hand."""
    monkeypatch.setattr(admission_module, "STEP_COST_TOKENS", 512)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "num_tokens", "num_nodes"),
    [
        # V (q - w) r^2 against 512 * 128 * q^2 = 65536 q^2.
        (4, 2, 16384, 1),  # 16384 * 1 * 16 = 65536 * 4
        (8, 4, 5461, 1),  # 5461 * 3 * 64 = 1048512 <= 65536 * 16 = 1048576 < 5462 * 3 * 64
        (8, 4, 16384, 4),  # all have theirs: one is taken to have none. 16384 * 1 * 64 = 65536 * 16
        (8, 4, 8192, 2),  # the mean of two, not their sum: 8192 * 2 * 64
        (1, 1, 65536, 1),
    ],
)
def test_one_more_waits_just_above_the_threshold(num_running, num_waiting, num_tokens, num_nodes):
    simulation = Simulation([full()])
    for more, waits in ((0, False), (1, True)):
        admission = expecting(simulation, num_tokens=num_tokens + more, num_nodes=num_nodes)
        assert admission._should_wait(num_running, num_waiting) is waits


def test_longer_outputs_make_steps_worth_more():
    """8 outputs of 256 tokens beside the 8 of 128 that are taken for granted: 192 on average."""
    simulation = Simulation([full()], max_model_len=300)
    for index in range(8):
        serve(simulation, [index], 256)
    for num_tokens, waits in ((24576, False), (24577, True)):
        admission = expecting(simulation, num_tokens=num_tokens)
        assert admission._should_wait(4, 2) is waits


def test_nothing_is_held_back_where_nothing_is_expected_or_all_is_lost_anyway():
    simulation = Simulation([full()])
    assert not expecting(simulation, num_tokens=10**9, num_nodes=0)._should_wait(1000, 1)
    assert expecting(simulation, num_tokens=16385)._should_wait(4, 2)
    # Per waiting request ever less: 16385 * 999 * 16 < 65536 * 10**6.
    assert not expecting(simulation, num_tokens=16385)._should_wait(4, 1000)


def room(simulation: Simulation, num_bytes: int, match: PrefixMatch = NO_MATCH, *, waits: bool = True) -> bool:
    """Whether a request of 19 tokens has room while others expect `num_bytes`."""
    # 16385 * 16 > 65536 * 4
    admission = expecting(simulation, num_tokens=16385 if waits else 16384, num_bytes=num_bytes)
    request = simulation.requests.get("more") or simulation.add("more", range(19), 1)
    return admission.has_room(request, match, [*simulation.scheduler.running] * 4, 2)


def test_room_beside_what_is_expected():
    """Pages of 16 bytes in an arena of 20. One runs with 4 pages, and 19 tokens with one more need 5: 11 pages,
    176 bytes, are left to the cache."""
    simulation = arena_of(21, [full()], page_tokens=4, max_model_len=64)
    simulation.add("running", [49] * 13, 2)
    simulation.step()
    assert simulation.manager.inspect().supply.num_owned == [4]
    assert room(simulation, 176)
    assert not room(simulation, 177)
    assert room(simulation, 177, waits=False)
    own = PrefixMatch(4, [100], NO_NODE, 4)
    assert room(simulation, 177, own), "what it expects itself is no reason to wait"
    other = PrefixMatch(4, [99], NO_NODE, 4)
    assert not room(simulation, 177, other)
    in_tail = PrefixMatch(6, [99], 100, 6)
    assert room(simulation, 177, in_tail)


def test_no_room_whatever_is_expected():
    """9 pages are wanted: an arena of 9 has them, one of 8 has not."""
    for num_slabs, fits in ((10, True), (9, False)):
        simulation = arena_of(num_slabs, [full()], page_tokens=4, max_model_len=20)
        simulation.add("running", [49] * 13, 2)
        simulation.step()
        assert room(simulation, 0) is fits


def test_a_running_prefill_counts_with_what_it_has_yet_to_take():
    """A prompt of 32 tokens has 16 computed, 4 pages; with its first token it will have 9. 9 + 5 pages of 14."""
    for num_slabs, fits in ((15, True), (14, False)):
        simulation = arena_of(num_slabs, [full()], page_tokens=4, max_model_len=48, max_num_seqs=2, chunk_tokens=16)
        request = simulation.add("running", [49, *range(31)], 2)
        simulation.step()
        assert simulation.manager.inspect().supply.num_owned == [4]
        admission = expecting(simulation, num_tokens=1, num_nodes=0)
        more = simulation.add("more", range(19), 1)
        assert admission.has_room(more, NO_MATCH, [request.row], 1) is fits


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_a_request_that_is_held_back_starts_when_nothing_runs(is_worth_it):
    """Two cached prompts are waited for behind a request that would evict them. It waits while another runs, and no
    longer; where steps are worth more than prefixes, not at all."""
    cost = 1e-9 if is_worth_it else 1e9
    with mock.patch.object(admission_module, "STEP_COST_TOKENS", cost):
        simulation = arena_of(33, [full()], page_tokens=4, max_model_len=64, max_num_seqs=2)
        cached = [[first, *range(31)] for first in (40, 41)]
        for prompt in cached:
            assert serve(simulation, prompt) == 0
        simulation.add("running", [45] * 20, 12)
        simulation.step()
        simulation.add("large", [46] * 40, 12)
        for index, prompt in enumerate(cached):
            simulation.add(f"w{index}", [*prompt, 49], 2)
        simulation.step()
        assert (simulation.requests["large"].row == -1) is is_worth_it
        while not simulation.requests["running"].is_finished:
            assert (simulation.requests["large"].row == -1) is is_worth_it
            simulation.step()
        simulation.step()
        assert simulation.requests["large"].row >= 0
        run_all(simulation)
    assert simulation.outputs["large"] == foretell(None, [46] * 40, 12)


def test_with_windows_too_every_request_is_admitted_in_the_end():
    with mock.patch.object(admission_module, "STEP_COST_TOKENS", 1e-9):
        simulation = arena_of(24, [full(), sliding(9)], page_tokens=4, max_model_len=48, max_num_seqs=3)
        prompts = [[index % 5, *range(20 + index)] for index in range(12)]
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                simulation.add(f"{turn}-{index}", prompt, 3)
        run_all(simulation)
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            assert simulation.outputs[f"{turn}-{index}"] == foretell(None, prompt, 3)
