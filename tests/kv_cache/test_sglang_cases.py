"""What hurt users of SGLang's hybrid KV cache, and facts that its own tests pin, as cases for lamella.

A tag like "(SGLang #29860)" names the public thread that a case is drawn from. SGLang's W counts previous tokens
only, so its W is `sliding(W + 1)` here. Speculative decoding, bigram keys, split nodes and the index map between
its two pools have no counterpart.
"""

from __future__ import annotations

import numpy as np
import pytest

from lamella.kv_cache import invariants
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import prompt_of, run_all, serve, step
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9)]


def evict_all(simulation):
    while simulation.manager.inspect().tree.evict_one():
        pass
    invariants.check(simulation.manager)


# Ownership


def test_a_page_given_back_is_not_given_back_again_by_who_had_it():
    """A free that was put off looked its page up again after the slot had come back to life, and freed the
    newcomer's (SGLang #36081, #27586). A decodes far from its prompt, whose window has gone; B computes the prompt
    anew and revives it; then A ends, and frees nothing of B's."""
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=2)
    prompt = prompt_of(24, 0)
    simulation.add("a", prompt, 40)
    step(simulation, 36)
    evict_all(simulation)
    dead = simulation.manager.inspect().tree.num_tombstones
    assert dead > 0
    simulation.add("b", [*prompt, 1, 2, 3], 20)
    step(simulation, 4)
    simulation.finish("a")
    step(simulation, 3)
    run_all(simulation)
    assert simulation.outputs["b"] == foretell(None, [*prompt, 1, 2, 3], 20)
    assert serve(simulation, [*prompt, 1, 2, 3], 3) == 26
    assert all(usage.owned == 0 for usage in simulation.manager.usage().values())


def test_a_lock_that_skipped_a_tombstone_does_not_undo_anothers():
    """A reader passed over a dead window page, which came back to life under another; the first one's release took
    the other's lock (SGLang #24972). The order of release must not matter."""
    prompt = prompt_of(16, 0)
    for order in (("a", "b", "c"), ("b", "a", "c"), ("c", "b", "a")):
        simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=3, max_model_len=128)
        simulation.add("a", prompt, 100)
        step(simulation, 30)
        evict_all(simulation)
        for name in ("b", "c"):
            simulation.add(name, [*prompt, 7], 30)
            step(simulation, 3)
        for name in order:
            assert simulation.requests[name].row >= 0
            simulation.finish(name)
            step(simulation, 2)
        for name in order:
            output = simulation.outputs[name]
            assert output == foretell(None, prompt if name == "a" else [*prompt, 7], len(output))
        assert not simulation.manager.inspect().tree.refs.any()
        assert all(usage.owned == 0 for usage in simulation.manager.usage().values())


def test_pages_of_a_request_in_the_middle_add_up():
    """Free and evictable pages exceeded the pool, for a request's slid range was forgotten when its prefix was
    entered early (SGLang #29350). Eight tokens in two chunks, pages of 1: four tombstones and four live."""
    simulation = Simulation([full(), sliding(5)], page_tokens=1, chunk_tokens=4, retention=RetentionPolicy("none"))
    simulation.add("r", range(12), 4)
    step(simulation, 2)
    manager = simulation.manager
    assert manager.grow(0, 8, 1, is_prefill=True)
    nodes = manager.inspect().rows.nodes[0, :8]
    assert (manager.inspect().tree.page[1, nodes] == NULL_PAGE).tolist() == [True] * 4 + [False] * 4
    assert (manager.inspect().tree.page[0, nodes] != NULL_PAGE).all()
    assert manager.inspect().tree.num_tombstones == 4
    assert manager.usage()["sliding_5"].owned == 5, "four of the window and one to come"


def test_long_shared_prefixes_end_with_no_lock_left():
    """Asserts on lock counts with long shared prefixes (SGLang #24153): requests that part at many places of one
    prompt, ended in another order than they came."""
    simulation = Simulation(HYBRID, page_tokens=4, max_num_seqs=6, max_model_len=128, chunk_tokens=32)
    prompt = prompt_of(60, 0)
    names = []
    for index, shared in enumerate((60, 41, 22, 60, 3, 43)):
        names.append(f"r{index}")
        simulation.add(names[-1], [*prompt[:shared], 7, index], 40)
        step(simulation, 3)
    for name in (names[2], names[0], names[5], names[3], names[4], names[1]):
        simulation.finish(name)
        step(simulation, 1)
    assert not simulation.manager.inspect().tree.refs.any()
    assert not simulation.manager.inspect().tree.pins.any()


# Windows against pages


def test_a_page_wider_than_the_window_keeps_the_end():
    """P 8, W 2, 11 tokens: the frontier of sliding reached the end of what was inserted, and usage went negative
    (SGLang #29860). Exactly the first block slides here when the prompt is done, and what is left resumes to the token.
    A block more is left for the request's end; it is wanted until the next one slides, when the fourth begins."""
    simulation = Simulation([full(), sliding(3)], page_tokens=8, chunk_tokens=16)
    simulation.add("r", range(11), 20)
    rows = simulation.manager.inspect().rows
    for num_steps, first_left, first_kept in ((1, 0, 1), (13, 0, 1), (1, 1, 2)):
        step(simulation, num_steps)
        assert (rows.first_left[1, 0], rows.first_kept[1, 0]) == (first_left, first_kept)
    run_all(simulation)
    assert serve(simulation, range(11), 6) == 10


@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
@pytest.mark.parametrize("previous", [1, 2, 4, 8])
def test_every_length_hits_to_the_token(page_tokens, previous):
    """SGLang's sweep of pages against windows: lengths from one page to five, resent."""
    simulation = Simulation(
        [full(), sliding(previous + 1)], page_tokens=page_tokens, max_model_len=6 * page_tokens, chunk_tokens=40
    )
    for index, length in enumerate((page_tokens + 1, 2 * page_tokens, 3 * page_tokens + 3, 5 * page_tokens - 1)):
        prompt = [index, *prompt_of(length - 1, length)]
        assert serve(simulation, prompt, 2) == 0
        assert serve(simulation, prompt, 2) == length - 1


@pytest.mark.parametrize(
    ("page_tokens", "window"),
    [(1, 4), (4, 4), (4, 2), (16, 16), (64, 64), (128, 128), (128, 4), (1, 128), (64, 63), (64, 65)],
)
def test_sessions_of_every_page_and_window(page_tokens, window):
    """SGLang's matrix: two chats take turns; each turn finds all that was computed before."""
    simulation = Simulation([full(), sliding(window)], page_tokens=page_tokens, max_model_len=320, chunk_tokens=64)
    histories = [prompt_of(70, 0), prompt_of(45, 1)]
    for turn in range(3):
        for history in histories:
            answer = foretell(None, history, 9)
            assert serve(simulation, history, 9) == (computed if (computed := len(history) - 24) and turn else 0)
            history += [*answer, *prompt_of(23, turn)]


def test_the_tail_below_the_last_page_is_whole():
    """W 127, P 64, 1,024 tokens: the frontier was one token off, and below 960 less than a window was left
    (SGLang #34870). A resume at 960, and anywhere after, needs 127 live tokens before it."""
    specs = [full(), *[sliding(128)] * 8]
    for shared in (960, 961, 1000, 1023):
        simulation = Simulation(specs, page_tokens=64, max_model_len=1100, chunk_tokens=256, extra_slabs=600)
        prompt = prompt_of(1024, 0)
        serve(simulation, prompt)
        assert serve(simulation, [*prompt[:shared], (prompt[shared] + 1) % 50, 3]) == shared


@pytest.mark.parametrize(
    ("num_computed", "first"), [(1, 0), (4, 0), (5, 1), (6, 2), (20, 16)]
)  # SGLang keeps a token more: it counts from the last computed one
def test_exactly_what_no_later_query_sees_is_dropped(num_computed, first):
    """W 4, pages of 1: once n tokens are computed, k <= n - 5 is seen no more."""
    manager = Simulation([full(), sliding(5)], page_tokens=1, chunk_tokens=40, enable_prefix_caching=False).manager
    assert manager.begin(0, manager.match(np.arange(30, dtype=np.int32)))
    assert manager.grow(0, 0, num_computed, is_prefill=True)
    assert manager.grow(0, num_computed, 1, is_prefill=True)
    assert manager.inspect().rows.first_kept[1, 0] == first


@pytest.mark.parametrize(("previous", "page_tokens", "locked"), [(4, 1, 4), (3, 2, 4), (5, 4, 8), (8, 2, 8)])
def test_a_hit_locks_the_window_and_leaves_a_block_more_for_its_end(previous, page_tokens, locked):
    """A hit of 12 tokens holds its full pages to the root, of the window only the pages that meet it. Those that meet
    the window at the block's end before are wanted for its end and not locked."""
    simulation = Simulation([full(), sliding(previous + 1)], page_tokens=page_tokens, chunk_tokens=16)
    serve(simulation, range(12))
    manager = simulation.manager
    assert manager.begin(0, manager.match(np.array([*range(12), 7], dtype=np.int32)))
    rows, tree = manager.inspect().rows, manager.inspect().tree
    assert int((rows.pages[0, 0] != NULL_PAGE).sum()) * page_tokens == 12
    assert int((rows.pages[1, 0] != NULL_PAGE).sum()) * page_tokens == locked
    below = 12 // page_tokens - locked // page_tokens - 1
    assert np.flatnonzero(tree.ends[1, rows.nodes[0, : 12 // page_tokens]]).tolist() == [below]


def test_the_prompts_window_is_let_go_during_decode():
    """After W steps of decode and one more a prompt's window pages are nobody's, its full pages still the
    request's."""
    simulation = Simulation([full(), sliding(5)], page_tokens=1)
    simulation.add("r", range(8), 20)
    step(simulation, 1 + 6)
    tree = simulation.manager.inspect().tree
    nodes = simulation.manager.inspect().rows.nodes[0, :8]
    assert tree.refs[1, nodes].tolist() == [0] * 8
    assert tree.refs[0, nodes].tolist() == [1] * 8


def test_what_matches_after_the_windows_between_have_gone():
    """Pages of 1, W 4: with only [1..5, 60, 70] left as a place to resume, [1..5] finds nothing and the whole
    prompt everything but its last token."""
    simulation = Simulation([full(), *[sliding(5)] * 9], page_tokens=1)
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], [10, 11, 12], [1, 2, 3, 4, 5, 45, 46]]
    for prompt in prompts:
        serve(simulation, prompt)
    tree = simulation.manager.inspect().tree
    node = tree.root(None)
    for token in prompts[3]:
        node = tree.child(node, np.array([token], dtype=np.int32).tobytes())
    for other in [other for other in tree.resume_points if other != node]:
        tree.drop_resume_point(other)
    invariants.check(simulation.manager)

    def match(tokens):
        return tree.match(np.array(tokens, dtype=np.int32), None, len(tokens)).num_tokens

    assert match([1, 2, 3, 4, 5]) == 0
    assert match([10, 11, 12]) == 0
    assert match(prompts[3]) == 7
    assert serve(simulation, prompts[3]) == 6


@pytest.mark.parametrize("length", [7, 8, 9, 10, 11, 23])
@pytest.mark.parametrize("resumed", [False, True])
def test_decode_sees_what_prefill_sees(length, resumed):
    """Decode lost its oldest key from W + 2 tokens on (SGLang #32087). W 9 around all lengths: a token computed by
    decode, by prefill or after a hit sees min(length, 9) keys, and the same token follows."""
    for specs in ([sliding(9)], [full(), sliding(9)]):
        simulation = Simulation(specs, page_tokens=4, chunk_tokens=64, extra_slabs=4000)
        prompt = prompt_of(length - 1, length)
        if resumed:
            serve(simulation, prompt)
        simulation.executor.most_keys_checked = 0
        answer = foretell(None, prompt, 3)
        serve(simulation, prompt, 3)  # the second and third token by decode at `length` and one more
        if specs == [sliding(9)] and resumed:
            assert simulation.executor.most_keys_checked == min(length + 1, 9)
        assert foretell(None, [*prompt, answer[0]], 2) == answer[1:]
        serve(simulation, [*prompt, answer[0]], 2)


@pytest.mark.parametrize(
    "specs", [[full(), sliding(5, 3)], [full(3), sliding(5)], [full(2), sliding(5, 3), sliding(9)]]
)
def test_page_ids_stay_in_the_slabs_of_their_group(specs):
    """An index of the full pool was used in the smaller window pool (SGLang #24617, #26966). Groups of unequal
    pages, windows that have wrapped around the arena: every id that a plan names lies in a slab of its group."""
    simulation = Simulation(specs, page_tokens=4, max_model_len=128, extra_slabs=3, max_num_seqs=3)
    manager = simulation.manager
    execute = simulation.executor.execute
    slabs_seen = set()

    def checked(plan, contexts):
        for group, part in enumerate(plan.groups):
            pages = np.concatenate([part.block_tables[part.block_tables != NULL_PAGE], part.slot_mapping // 4])
            slabs = pages // manager.layout.slab_units
            assert slabs.min() >= 1
            assert slabs.max() < manager.inspect().arena.num_slabs
            assert (manager.inspect().arena.slab_group[slabs] == group).all()
            offsets = pages % manager.layout.slab_units
            assert (offsets % manager.layout.groups[group].page_units == 0).all()
            slabs_seen.update((group, slab) for slab in slabs.tolist())
        return execute(plan, contexts)

    simulation.executor.execute = checked
    prompts = [prompt_of(30, index) for index in range(6)]
    for index, prompt in enumerate(prompts):
        simulation.add(f"r{index}", prompt, 90)
    run_all(simulation)
    for index, prompt in enumerate(prompts):
        assert simulation.outputs[f"r{index}"] == foretell(None, prompt, 90)
    assert len({slab for _, slab in slabs_seen}) < len(slabs_seen), "slabs did serve more than one group"
