"""What SGLang's users met in admission, eviction and preemption, as cases for lamella.

SGLang's W counts previous tokens only, so its W is `sliding(W + 1)` here.
"""

from __future__ import annotations

import numpy as np
import pytest

from lamella.errors import CapacityError
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.sizing import size_pool
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import arena_of, prompt_of, run_all, serve, step
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9)]


def test_a_short_request_is_charged_what_it_is_long():
    """100 tokens free, W 128, pages of 8, 16 tokens and 30 to come: charged a whole window, it was never admitted,
    with the host at 100 % (SGLang #32379)."""
    simulation = arena_of(1 + 18 + 13, [sliding(129)], page_tokens=8, max_model_len=200, chunk_tokens=8)
    simulation.add("long", prompt_of(144, 0), 20)
    step(simulation, 20)
    assert simulation.manager.inspect().arena.num_allocatable(0) <= 13
    short = simulation.add("short", prompt_of(16, 1), 30)
    step(simulation, 1)
    assert short.row >= 0
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0


def test_what_does_not_fit_now_waits():
    """Under passing pressure half of the running requests were thrown out for one (SGLang #32700): a request whose
    need lies between what is free and the pool waits."""
    simulation = arena_of(1 + 48, [full(), sliding(9)], page_tokens=4, max_model_len=100, chunk_tokens=8)
    for index in range(2):
        simulation.add(f"running{index}", prompt_of(40, index), 40)
    step(simulation, 24)
    waiting = simulation.add("waiting", prompt_of(60, 9), 8)
    step(simulation, 1)
    assert waiting.row < 0
    assert len(simulation.scheduler.running) == 2
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0
    assert simulation.outputs["waiting"] == foretell(None, prompt_of(60, 9), 8)


@pytest.mark.parametrize("chunk_tokens", [64, 256])
def test_a_prompt_longer_than_the_pools_two_chunks_goes_on(chunk_tokens):
    """A request starved on slots that it held itself (SGLang #36458): the least pool, chunks as large as it."""
    simulation = Simulation(
        [full(), sliding(9)], page_tokens=4, max_model_len=256, extra_slabs=0, chunk_tokens=chunk_tokens
    )
    assert serve(simulation, prompt_of(240, 0), 16) == 0
    assert simulation.scheduler.counters().num_preemptions == 0


def test_a_pool_below_window_and_page_is_refused_at_start_up():
    """It hung (SGLang #37610). W 64 and a chunk of a page need 1 + ceil(63 / 16) + ceil(31 / 16) pages, and
    the null page."""
    layout = build_layout([sliding(64)], page_tokens=16)
    sizes = {"max_model_len": 1024, "longest_model_len": 1024, "chunk_tokens": 16, "interval_tokens": 16}
    assert size_pool(layout, memory_bytes=(1 + 7) * layout.slab_bytes, **sizes).num_slabs == 8
    with pytest.raises(CapacityError):
        size_pool(layout, memory_bytes=(1 + 7) * layout.slab_bytes - 1, **sizes)


def test_a_chunk_is_cut_to_the_pages_there_are():
    """Page slack was not reserved, and a prefill ran out of memory (SGLang #23174). P 64, 100 tokens left beside
    what decodes: a chunk of 64 is taken, or what there is, and nobody is thrown out for a chunk."""
    simulation = arena_of(1 + 9, [sliding(65)], page_tokens=64, max_model_len=512, chunk_tokens=300)
    simulation.add("decoding", prompt_of(200, 0), 40)
    step(simulation, 6)
    simulation.add("prefilling", prompt_of(300, 1), 4)
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0
    assert simulation.outputs["prefilling"] == foretell(None, prompt_of(300, 1), 4)
    assert simulation.outputs["decoding"] == foretell(None, prompt_of(200, 0), 40)


def test_decodes_take_pages_only_at_block_ends():
    """Eight-token pages, 16 tokens free: 5 -> 6 and 7 -> 8 cost nothing, two requests that go 8 -> 9 fit, three do
    not. An estimate of a page more for each refused work that fits."""
    for lengths, fit in (((5, 5), True), ((7, 7), True), ((8, 8), True), ((8, 8, 8), False)):
        simulation = arena_of(1 + len(lengths) + 2, [full()], page_tokens=8, max_model_len=16, max_num_seqs=4)
        manager = simulation.manager
        for row, length in enumerate(lengths):
            assert manager.begin(row, manager.match(np.arange(16, dtype=np.int32)))
            assert manager.grow(row, 0, length, is_prefill=True)
        grown = [manager.grow(row, length, 1, is_prefill=False) for row, length in enumerate(lengths)]
        assert all(grown) == fit
        assert sum(grown) == min(len(lengths), 2) if not fit else True


def test_cached_windows_give_way_before_anyone_is_preempted():
    """ "KV cache is full", with 445,000 window slots that could have been evicted: eviction was asked for full
    tokens only (SGLang #29662). A cache filled with windows (policy "all"), then requests that need them."""
    simulation = arena_of(
        1 + 60,
        [full(), sliding(9)],
        page_tokens=4,
        max_model_len=100,
        chunk_tokens=16,
        retention=RetentionPolicy("all", spare=False),
    )
    for index in range(6):
        serve(simulation, prompt_of(80, index))
    assert simulation.manager.inspect().arena.num_free_slabs < 30  # a request needs more
    evicted = simulation.manager.inspect().tree.num_evicted_resume_points
    simulation.add("a", prompt_of(40, 10), 20)
    simulation.add("b", prompt_of(40, 11), 20)
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0
    assert simulation.manager.inspect().tree.num_evicted_resume_points > evicted


def test_matching_a_chain_does_not_push_out_a_branch():
    """A match refreshed all ancestors, so side branches were always the oldest (SGLang #26615). A chat of three
    turns and a branch; the chat is matched, one place is evicted: the branch and the chat's end both stay."""
    simulation = Simulation(HYBRID, page_tokens=4, max_model_len=128)
    chat = prompt_of(20, 0)
    for turn in range(3):
        serve(simulation, chat, 4)
        if turn < 2:
            chat = [*chat, *foretell(None, chat, 4), *prompt_of(8, turn)]
    branch = prompt_of(24, 7)
    serve(simulation, branch)
    assert serve(simulation, chat, 4) == len(chat) - 1
    assert simulation.manager.inspect().tree.evict_one()
    assert serve(simulation, branch) == 23
    assert serve(simulation, chat, 4) == len(chat) - 1


def test_full_pages_without_a_place_to_resume_are_not_kept():
    """Full KV that led to no window any more filled 74 % of the pool (SGLang #29369): it goes with the last
    resume point that it led to."""
    simulation = Simulation(HYBRID, page_tokens=4, max_model_len=128)
    serve(simulation, prompt_of(60, 0), 8)
    serve(simulation, prompt_of(20, 1), 8)
    tree = simulation.manager.inspect().tree
    while len(tree.resume_points) > 1:
        assert tree.evict_one()
    (left,) = tree.resume_points
    assert simulation.manager.usage()["full"].cached == -(-int(tree.end[left]) // 4)
    assert tree.evict_one()
    assert simulation.manager.usage()["full"].cached == 0
