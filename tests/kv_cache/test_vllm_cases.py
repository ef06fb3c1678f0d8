"""What hurt users of vLLM's hybrid KV cache, and facts that its own tests pin, as cases for lamella.

A tag like "(vLLM #39734)" names the public thread that a case is drawn from. Speculative decoding, connectors
and state-space layers have no counterpart here.
"""

from __future__ import annotations

import numpy as np
import pytest

from lamella.errors import CapacityError
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.capacity import num_requests_that_fit
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.sizing import request_pages, size_pool
from lamella.kv_cache.spec import ceil_div
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import arena_of, prompt_of, run_all, serve
from tests.helpers.simulation import Simulation, chunked, full, sliding

# Admission and sizing


def test_a_prompt_is_admitted_by_the_window_it_can_hold():
    """Start-up sized the window by its bound, admission by the whole prompt: with W 64, pages of 16 and 128 tokens
    a step a request was refused forever in an empty pool of 64 + 13 + 1 pages (vLLM #39734). Here one function
    says both: the pool is exactly one request of 1,024 tokens with its whole chunk, and the block more that its end
    is kept with, and everything runs in it."""
    simulation = arena_of(79, [full(), sliding(64)], page_tokens=16, max_model_len=1024, chunk_tokens=128)
    assert simulation.scheduler.chunk_tokens == 128
    request = simulation.add("r", prompt_of(512, 0), 4)
    assert simulation.step()
    assert request.row >= 0
    run_all(simulation)
    assert simulation.outputs["r"] == foretell(None, prompt_of(512, 0), 4)
    assert serve(simulation, prompt_of(1020, 1), 4) == 0
    assert simulation.scheduler.counters().num_preemptions == 0


def test_what_can_never_fit_is_refused_at_start_up():
    """In vLLM it waited in the queue forever (vLLM #39734). Five pages hold no 256 tokens; a length that
    start-up finds by itself does run."""
    layout = build_layout([full(), sliding(64)], page_tokens=16)
    sizes = {"longest_model_len": 256, "chunk_tokens": 128, "interval_tokens": 16}
    with pytest.raises(CapacityError, match="needs"):
        size_pool(layout, memory_bytes=5 * layout.slab_bytes, max_model_len=256, **sizes)
    found = size_pool(layout, memory_bytes=5 * layout.slab_bytes, max_model_len=None, **sizes).max_model_len
    assert found == 32, "two pages of each group, and the null slab"
    simulation = arena_of(5, [full(), sliding(64)], page_tokens=16, max_model_len=found)
    assert serve(simulation, range(found - 3), 3) == 0


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 16])
def test_what_sizing_foretells_is_what_is_taken(num_tokens):
    """A predictor that differs from the allocator either refuses what fits or runs out halfway. What is left for the
    request's end counts as taken, for it is its last block."""
    simulation = Simulation([full(), sliding(4)], page_tokens=2, max_model_len=32, chunk_tokens=3, extra_slabs=800)
    rows, schedule, taken = simulation.manager.inspect().rows, simulation.scheduler.schedule, []

    def watched():
        plan = schedule()
        num_left = (rows.first_kept - rows.first_left).sum(axis=1)
        taken.append((rows.pages != NULL_PAGE).sum(axis=(1, 2)) + num_left)
        return plan

    simulation.scheduler.schedule = watched
    serve(simulation, range(num_tokens), 1)
    foretold = request_pages(simulation.manager.layout, max_model_len=num_tokens, chunk_tokens=3, interval_tokens=2)
    assert tuple(np.max(taken, axis=0).tolist()) == foretold == (num_tokens // 2, min(num_tokens // 2, 5))


def test_concurrency_is_counted_from_the_pages_of_each_group():
    """Blocks over groups times block size told users half of what fits (vLLM #40691). Four requests of 256 tokens
    need 4 * 16 full pages, and of W 32 four pages each while they decode and six for the one that prefills."""
    layout = build_layout([full(), sliding(32)], page_tokens=16)
    sizes = {"context_tokens": 256, "chunk_tokens": 32, "interval_tokens": 16}
    assert num_requests_that_fit(layout, 1 + 4 * 16 + 3 * 4 + 6, **sizes) == 4
    assert num_requests_that_fit(layout, 4 * 16 + 3 * 4 + 6, **sizes) == 3
    simulation = arena_of(
        1 + 4 * 16 + 3 * 4 + 6, [full(), sliding(32)], page_tokens=16, max_model_len=256, chunk_tokens=32
    )
    for index in range(4):
        simulation.add(f"r{index}", prompt_of(200, index), 56)
    most_running = 0
    while simulation.scheduler.has_requests:
        simulation.step()
        most_running = max(most_running, len(simulation.scheduler.running))
    assert most_running == 4
    assert simulation.scheduler.counters().num_preemptions == 0


def test_a_prompt_that_would_push_out_another_waits():
    """Eleven blocks, two prompts of five blocks: the first one's first decode evicted the second, whose prefill was
    lost (vLLM's scheduler tests; last-in victims, vLLM #54644). Here the room for a whole prompt is looked for
    first."""
    simulation = arena_of(11, [full()], page_tokens=16, max_model_len=160, chunk_tokens=80)
    for index in range(2):
        simulation.add(f"r{index}", prompt_of(80, index), 30)
    run_all(simulation)
    assert simulation.scheduler.counters().num_preemptions == 0
    for index in range(2):
        assert simulation.outputs[f"r{index}"] == foretell(None, prompt_of(80, index), 30)


def test_a_step_takes_prompts_in_order_up_to_its_budget():
    """Prompts of 800, 800, 10, 10 tokens, 1,024 a step: the second is cut, and nobody passes it."""
    simulation = Simulation([full()], page_tokens=16, max_model_len=1024, chunk_tokens=1024, extra_slabs=400)
    for index, length in enumerate((800, 800, 10, 10)):
        simulation.add(f"r{index}", prompt_of(length, index), 1)
    plan = simulation.scheduler.schedule()
    assert np.diff(plan.query_start).tolist() == [800, 224]


def test_a_prompt_of_500_in_chunks_of_256():
    simulation = Simulation([full()], page_tokens=16, max_model_len=1024, chunk_tokens=256)
    simulation.add("r", prompt_of(500, 0), 2)
    lengths = []
    while simulation.scheduler.has_requests:
        plan = simulation.scheduler.schedule()
        lengths += np.diff(plan.query_start).tolist()
        tokens = simulation.scheduler.rows.tokens[0, : simulation.scheduler.rows.num_tokens[0]].tolist()
        simulation.scheduler.update(simulation.executor.execute(plan, [(None, tokens)]))
    assert lengths == [256, 244, 1]


@pytest.mark.parametrize(("num_computed", "num_new"), [(3, 2), (3, 4)])
def test_blocks_cover_what_is_computed_and_what_is_new(num_computed, num_new):
    manager = Simulation([full()], page_tokens=4).manager
    assert manager.begin(0, manager.match(np.arange(8, dtype=np.int32)))
    assert manager.grow(0, 0, num_computed, is_prefill=True)
    assert manager.grow(0, num_computed, num_new, is_prefill=True)
    assert int(manager.inspect().rows.num_blocks[0]) == 2
    assert manager.next_due(0) == 8


# Hits


def test_sessions_that_fit_always_find_all_of_themselves():
    """Sessions that take turns: as soon as they exceeded a quarter of the pool, all reuse was lost at once
    (vLLM #48435). Here four sessions take turns in a pool of their full pages and tails: every turn finds
    everything that the turns before computed."""
    num_sessions, num_turns, new_tokens, answer_tokens = 4, 5, 48, 16
    total = num_turns * (new_tokens + answer_tokens)
    tail_pages = ceil_div(63, 16) + 2  # the window, wherever it begins, and one block more
    num_slabs = 1 + num_sessions * (ceil_div(total, 16) + tail_pages) + 10  # the chunk and the window in flight
    simulation = arena_of(num_slabs, [full(), sliding(64)], page_tokens=16, max_model_len=total + 16)
    histories = [prompt_of(new_tokens, session) for session in range(num_sessions)]
    for turn in range(num_turns):
        for session, history in enumerate(histories):
            hit = serve(simulation, history, answer_tokens)
            assert hit == max(0, turn * (new_tokens + answer_tokens) - 1), f"turn {turn} of session {session}"
            history += [*foretell(None, history, answer_tokens), *prompt_of(new_tokens, 100 + session)]


def test_a_long_request_beside_a_cached_one_flushes_nothing():
    """Window pages that a long request only passed through pushed older prompts out of the cache: 0 % on resent
    prompts (vLLM #42948). A leaves 5 full pages and a tail of 6; B holds at most 64 full pages and 13."""
    simulation = arena_of(1 + 5 + 6 + 64 + 13, [full(), sliding(64)], page_tokens=16, max_model_len=1024)
    first = prompt_of(80, 0)
    serve(simulation, first)
    assert serve(simulation, prompt_of(1000, 1), 16) == 0
    assert serve(simulation, first) == 79


@pytest.mark.parametrize(
    "specs",
    [
        [full(), sliding(48)],
        [full(), sliding(32), sliding(64)],
        [full(), sliding(32), sliding(64), chunked(32)],
        [sliding(32), sliding(64)],
        [sliding(48)],
        [full()],
        [full(2), full(), sliding(64), sliding(32)],
        [full(), chunked(64)],
    ],
    ids=lambda specs: "+".join(type(spec).__name__[:4] for spec in specs),
)
def test_any_mix_of_groups_hits(specs):
    """With a third attention group hits were seen to collapse to nothing (vLLM PR #33270, #51771): each group may
    shorten a hit, none may do so twice. Six blocks and five tokens; a hit is exact to the token, so the prompt's
    resend finds 100, and one that parts after 48 finds 48 once the window there is kept."""
    simulation = Simulation(specs, page_tokens=16, max_model_len=160, chunk_tokens=160, extra_slabs=3000)
    prompt = prompt_of(101, 0)
    serve(simulation, prompt, 8)
    assert serve(simulation, prompt, 8) == 100
    others = [(prompt[48] + shift) % 50 for shift in (1, 2, 3)]
    hits = [serve(simulation, [*prompt[:48], other, *prompt_of(30, other)], 1) for other in others]
    assert hits[1:] == [48, 48]


def test_siblings_share_pages_and_keep_their_own_ends():
    """71 tokens, pages of 16: a sibling that shares 64 uses the same four pages in each group; with W 32, of the
    window only the last two and one block more. (vLLM's prefix caching tests.)"""
    simulation = Simulation(
        [full(), sliding(32, 2), sliding(32)], page_tokens=16, max_model_len=128, chunk_tokens=80, extra_slabs=3000
    )
    common = prompt_of(64, 0)
    simulation.add("a", [*common, *[1] * 7], 20)
    simulation.step()
    sibling = simulation.add("b", [*common, *[2] * 7], 20)
    simulation.step()
    assert sibling.num_cached_tokens == 64
    tables = simulation.manager.inspect().rows.pages
    assert (tables[0, 0, :4] == tables[0, 1, :4]).all()
    for group in (1, 2):
        assert tables[group, 1, 0] == NULL_PAGE
        assert (tables[group, 1, 1:4] == tables[group, 0, 1:4]).all()
    assert (tables[:, 0, 4] != tables[:, 1, 4]).all()
    run_all(simulation)
    for name, end in (("a", 1), ("b", 2)):
        assert simulation.outputs[name] == foretell(None, [*common, *[end] * 7], 20)
    assert serve(simulation, [*common, *[2] * 3, 40]) == 67


def test_a_prefix_outlives_the_ends_that_hang_on_it():
    """Eviction takes a chain from its end: both siblings' own blocks go before what they share."""
    simulation = Simulation([full()], page_tokens=16, max_model_len=128, chunk_tokens=64)
    common = prompt_of(48, 0)
    prompts = [[*common, *[end] * 7] for end in (1, 2)]
    for prompt in prompts:
        serve(simulation, prompt)

    def cached():
        return [simulation.manager.match(np.array([*prompt, 9], dtype=np.int32)).num_tokens for prompt in prompts]

    seen = [cached()]
    while simulation.manager.inspect().tree.evict_one():
        seen.append(cached())
    assert seen[0] == [55, 55]
    assert [48, 48] in seen
    assert all(hits == [48, 48] or max(hits) == 55 or max(hits) < 48 for hits in seen)
    assert seen[-1] == [0, 0]


@pytest.mark.parametrize(
    ("full_blocks", "dead", "blocks"),
    [
        (3, {}, 3),
        (3, {1: [0], 2: [0]}, 3),  # block 0 lies before the window at 48
        (3, {1: [2]}, 2),
        (3, {2: [2]}, 2),
        (3, {1: [1]}, 1),
        (2, {1: [0]}, 0),  # the window at 32 begins at 1
    ],
)
def test_each_group_keeps_its_own_part_of_a_prefix(full_blocks, dead, blocks):
    """Full attention and two groups of W 32: a hit is as long as all of them allow. `dead`: group -> blocks whose
    page is gone. Without its full page a block does not exist, nor what follows it."""
    specs = (full(), sliding(32, 2), sliding(32))
    manager = Simulation([*specs], page_tokens=16).manager
    tree = manager.inspect().tree
    prompt = np.arange(16 * full_blocks + 1, dtype=np.int32)
    node = tree.root(None)
    tree.pin(node)
    for block in range(full_blocks):
        node = tree.insert(node, prompt[16 * block : 16 * (block + 1)].tobytes())
        for group in range(3):
            if block not in dead.get(group, ()):
                tree.page[group, node] = 100 * group + block
    assert manager.match(prompt).num_tokens == 16 * blocks


def test_a_rewind_finds_what_the_policy_keeps():
    """Back to a prefix of a long prompt after pressure: full KV was found, its window was not, and nobody said so
    (vLLM #21017). Documented here: "all" and a grid keep the place; "tails" does from the second rewind on, for
    the first one shows that prompts part there. Ten layers of W 64 make replaying the window too dear."""
    specs = [full(), *[sliding(64)] * 10]
    long = prompt_of(512, 0)

    def hits(retention):
        simulation = Simulation(
            specs, page_tokens=16, max_model_len=1024, chunk_tokens=64, extra_slabs=300, retention=retention
        )
        serve(simulation, long)
        serve(simulation, prompt_of(512, 1))
        return [serve(simulation, [*long[:200], 49, 48, 47]) for _ in range(2)]

    assert hits(RetentionPolicy("all")) == [200, 202]
    assert hits(RetentionPolicy("tails", 96, spare=False)) == [192, 202]
    assert hits(RetentionPolicy("tails", spare=False)) == [0, 202]


@pytest.mark.parametrize(
    ("retention", "blocks"),
    [
        (RetentionPolicy("tails", spare=False), {14, 15}),
        (RetentionPolicy("tails", 64, spare=False), {2, 3, 6, 7, 10, 11, 14, 15}),
        (RetentionPolicy("all"), set(range(16))),
        (RetentionPolicy("none"), set()),
    ],
    ids=str,
)
def test_which_blocks_a_policy_keeps(retention, blocks):
    """Only windows, W 16, 256 tokens: vLLM's default keeps block 14 alone, for a replay from 240. Here the end
    and one block more are kept, so a resend recomputes one token."""
    simulation = Simulation(
        [sliding(16)], page_tokens=16, max_model_len=512, chunk_tokens=256, extra_slabs=800, retention=retention
    )
    prompt = prompt_of(256, 0)
    serve(simulation, prompt)
    tree = simulation.manager.inspect().tree
    kept = {int(tree.end[node]) // 16 - 1 for node in tree.nodes() if tree.page[0, node] != NULL_PAGE}
    assert kept == blocks
    assert serve(simulation, prompt) == (255 if blocks else 0)


def test_a_place_where_prompts_part_is_kept_with_its_window():
    """A junction at 96 keeps block 5 (vLLM's retention tests), and here one block more."""
    simulation = Simulation([full(), *[sliding(16)] * 20], page_tokens=16, max_model_len=512, chunk_tokens=64)
    prompt = prompt_of(256, 0)
    serve(simulation, prompt)
    serve(simulation, [*prompt[:96], *prompt_of(64, 1)])
    tree = simulation.manager.inspect().tree
    node, kept = tree.root(None), []
    for block in range(16):
        node = tree.child(node, np.array(prompt[16 * block : 16 * (block + 1)], dtype=np.int32).tobytes())
        assert node != NO_NODE
        if tree.page[1, node] != NULL_PAGE:
            kept.append(block)
    assert kept == [4, 5, 14, 15]
    assert serve(simulation, [*prompt[:96], *prompt_of(64, 2)]) == 96


@pytest.mark.parametrize("shared", [240, 241, 250, 255])
def test_a_prompt_that_parts_in_the_last_block_hits(shared):
    """A tail of exactly the window missed as soon as a prompt parted inside the last block (vLLM #57610)."""
    simulation = Simulation([full(), *[sliding(64)] * 10], page_tokens=16, max_model_len=512, chunk_tokens=64)
    prompt = prompt_of(256, 0)
    serve(simulation, prompt)
    assert serve(simulation, [*prompt[:shared], *[(prompt[shared % 256] + 1) % 50] * 20]) == shared


def test_a_hit_takes_only_the_live_window():
    """On a hit window pages were first taken for the whole prefix and then freed (vLLM #30166)."""
    simulation = Simulation([full(), sliding(64)], page_tokens=16, max_model_len=1024, chunk_tokens=64)
    prompt = prompt_of(800, 0)
    serve(simulation, prompt)
    manager = simulation.manager
    manager.inspect().supply.peak_owned[:] = manager.inspect().supply.num_owned
    assert serve(simulation, [*prompt, 1, 2]) == 800
    assert manager.inspect().supply.peak_owned == [51, 5]


def test_pages_used_anew_are_not_found_under_their_old_tokens():
    """A reused block loses its key; one that can be found is evicted only when nothing is free."""
    simulation = arena_of(1 + 8 + 6, [full(), sliding(16)], page_tokens=16, max_model_len=128, chunk_tokens=16)
    prompts = [prompt_of(100, index) for index in range(3)]
    assert serve(simulation, prompts[0]) == 0
    assert simulation.manager.inspect().tree.num_evicted_resume_points == 0
    assert serve(simulation, prompts[1]) == 0
    assert serve(simulation, prompts[2]) == 0
    assert simulation.manager.inspect().tree.num_evicted_resume_points > 0
    assert serve(simulation, prompts[0]) == 0
    assert serve(simulation, prompts[0]) == 99
