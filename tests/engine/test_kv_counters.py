"""What the engine says the KV cache did, against numbers worked out by hand."""

from __future__ import annotations

from lamella import LLM, SamplingParams
from lamella.kv_cache.block_manager import GroupUsage
from lamella.kv_cache.counters import HitCounters
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.simulation import Simulation, full, sliding
from tests.helpers.tiny_gemma import save_tiny_gemma

HYBRID = [full(), sliding(9)]  # groups "full" and "sliding_9"; pages of 4 tokens


def counted(simulation):
    return simulation.manager.counters(simulation.scheduler.counters().hits)


def run_one(simulation, name, prompt, num_tokens=1):
    simulation.add(name, prompt, num_tokens)
    simulation.run()


def test_hits_count_by_kind():
    simulation = Simulation(HYBRID, page_tokens=4)
    run_one(simulation, "cold", range(22))
    assert counted(simulation).hits == HitCounters()
    run_one(simulation, "parts inside block 4", [*range(18), 40, 41])  # 4 blocks, and a copy of 2 tokens
    run_one(simulation, "parts at a block", [*range(16), 42, 43])  # 4 blocks
    simulation.manager.reset_prefix_cache()
    run_one(simulation, "cold again", [7, 8, 9])
    run_one(simulation, "less than a block", [7, 8, 10])  # a copy of 2 tokens
    hits = counted(simulation).hits
    assert hits == HitCounters(
        num_full_requests=2, num_full_tokens=32, num_partial_requests=2, num_partial_tokens=4,
        num_replay_requests=0, num_replay_tokens=0,
    )  # fmt: skip
    assert simulation.scheduler.counters().num_cached_tokens == 36


def test_what_a_preempted_request_finds_is_no_hit():
    simulation = Simulation(HYBRID, page_tokens=4)
    run_one(simulation, "before", range(8))
    request = simulation.add("r", [*range(8), *range(20, 32)], 20)
    for _ in range(6):
        simulation.step()
    expected = HitCounters(num_full_requests=1, num_full_tokens=8)
    assert counted(simulation).hits == expected
    simulation.scheduler._preempt(request.row)
    assert simulation.manager.match(request.token_ids).num_tokens == 25, "the resume finds 20 prompt and 5 more tokens"
    simulation.run()
    counters = simulation.scheduler.counters()
    assert (counters.hits, counters.num_preemptions) == (expected, 1)
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (28, 8)


def test_pages_and_evictions_of_one_prompt():
    """22 tokens: 5 blocks and a part. The second chunk starts at 16, where a window of 9 begins at 8: blocks 0 and 1 of
    the sliding group are dropped. The prompt's end is kept at 20, and at 22 when the request ends: two resume
    points, which hold blocks 2 to 5."""
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=16)
    run_one(simulation, "r", range(22))
    now = counted(simulation)
    assert (now.pages["full"].owned, now.pages["full"].cached) == (0, 6)
    assert (now.pages["sliding_9"].owned, now.pages["sliding_9"].cached) == (0, 4)
    assert now.num_tombstones == 2
    assert (now.num_evicted_resume_points, now.num_evicted_spare_pages, now.num_dead_full_pages) == (0, 0, 0)
    simulation.manager.reset_prefix_cache()
    now = counted(simulation)
    assert now.pages == {"full": GroupUsage(0, 0, 0), "sliding_9": GroupUsage(0, 0, 0)}
    assert now.num_evicted_resume_points == 2
    assert now.num_tombstones == 6, "and the four sliding pages that were held"
    assert now.num_dead_full_pages == 6, "no block leads to a resume point any more"
    assert now.num_evicted_spare_pages == 0


def test_spare_pages_are_evicted_as_such():
    """As above, but blocks 0 and 1 of the sliding group stay until they are evicted."""
    simulation = Simulation(HYBRID, page_tokens=4, chunk_tokens=16, retention=RetentionPolicy())
    run_one(simulation, "r", range(22))
    assert counted(simulation).pages["sliding_9"].cached == 6
    assert counted(simulation).num_tombstones == 0
    assert simulation.manager.inspect().tree.evict_one()
    assert (counted(simulation).num_evicted_spare_pages, counted(simulation).num_evicted_resume_points) == (1, 0)
    simulation.manager.reset_prefix_cache()
    now = counted(simulation)
    assert (now.num_evicted_spare_pages, now.num_evicted_resume_points) == (2, 2)
    assert (now.num_tombstones, now.num_dead_full_pages) == (6, 6)


def test_engine_stats_have_them(tmp_path):
    save_tiny_gemma(tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = list(range(7, 57))  # 50 tokens, pages of 16: all but the last are found, 3 blocks and 1 token
    with LLM(
        str(tmp_path), max_model_len=128, max_num_seqs=2, kv_cache_memory_bytes=2**21, dtype="float32", device="cpu"
    ) as llm:
        for _ in range(2):
            llm.generate([prompt], greedy, use_tqdm=False)
        stats = llm.engine.stats()
        assert stats.kv_cache.hits == HitCounters(
            num_full_requests=1, num_full_tokens=48, num_partial_requests=1, num_partial_tokens=1
        )
        assert (stats.kv_cache.pages["full"].owned, stats.kv_cache.pages["full"].cached) == (0, 4)
        assert stats.pages == stats.kv_cache.pages
        assert (stats.kv_cache.num_slab_moves, stats.kv_cache.num_moved_pages) == (0, 0)
        llm.reset_prefix_cache()
        assert llm.engine.stats().kv_cache.num_dead_full_pages == 4


def test_a_replay_counts_what_is_computed_again():
    """W 5, pages of 1, parting at 40 where the window is gone: 4 tokens are computed again, 36 are found."""
    simulation = Simulation([full(), sliding(5)], page_tokens=1)
    run_one(simulation, "cold", range(50))
    run_one(simulation, "parts in the middle", [*range(40), 7, 8])
    assert counted(simulation).hits == HitCounters(
        num_full_requests=1, num_full_tokens=36, num_replay_requests=1, num_replay_tokens=4
    )
    assert simulation.scheduler.counters().num_cached_tokens == 36
