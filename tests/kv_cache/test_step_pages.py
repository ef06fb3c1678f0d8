"""Step pages: sliding KV of a chunk that nobody needs after the step takes one layer's memory, and leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.admission import Admission
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache import invariants
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.prefix_match import NO_MATCH
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.sizing import held_chunk_tokens
from lamella.kv_cache.step_pages import region_bytes
from tests.helpers.fake_executor import foretell
from tests.helpers.serving import run_all, serve
from tests.helpers.simulation import Simulation, chunked, commit_row, full, sliding

# A block of 4 tokens is 16 B in each layer, so a unit is 16 B: pages of 1 and 2 units, 2 and 1 to a slab of 2.
HYBRID = [full(), sliding(9), sliding(9)]
TAILS = RetentionPolicy(spare=False)


def manager_of(
    specs=HYBRID, *, page_tokens=4, num_slabs=60, step_tokens=64, kv_sharing=None, never_idle=True, **options
):
    layout = build_layout(specs, page_tokens=page_tokens, kv_sharing=kv_sharing)
    manager = BlockManager(
        layout, num_slabs=num_slabs, num_rows=3, max_model_len=120, interval_tokens=page_tokens,
        step_pages_bytes=region_bytes(layout, step_tokens), **{"retention": TAILS, **options},
    )  # fmt: skip
    if never_idle:
        manager.inspect().supply.idle_bytes = lambda: 0
    return manager


def tokens(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def start(manager, row: int, prompt: np.ndarray, num_tokens: int) -> int:
    """Admit to `row` and grow by a chunk up to `num_tokens`; how many tokens were found."""
    match = manager.match(prompt)
    assert manager.begin(row, match)
    assert manager.grow(row, match.num_tokens, num_tokens - match.num_tokens, is_prefill=True)
    manager.commit_ahead(row, prompt, num_tokens)
    invariants.check(manager)
    return match.num_tokens


def finish(manager, row: int, prompt: np.ndarray, num_computed: int, *, ends_prompt: bool = False) -> None:
    """What the scheduler does when the step has run."""
    manager.end_step()
    commit_row(manager, row, prompt, num_computed, ends_prompt=ends_prompt)
    manager.slide([row], [num_computed], [0])
    invariants.check(manager)


def request_of(prompt: np.ndarray) -> Request:
    return Request(
        request_id="r", sample_index=0, params=SamplingParams(temperature=0), token_ids=prompt,
        num_prompt_tokens=len(prompt), max_total_tokens=len(prompt) + 1, seed=0, eos_token_ids=frozenset(),
        stop_token_ids=frozenset(), arrival_time=0.0,
    )  # fmt: skip


def step_blocks(manager, row: int, group: int) -> list[int]:
    pages = manager.inspect().rows.pages[group, row]
    return np.flatnonzero((pages != NULL_PAGE) & (pages >= manager.inspect().step_pages.first_page)).tolist()


class TestWhichBlocks:
    """W 9, pages of 4: the window and a block more at 40 needs position 36 - 8 = 28 on, which is block 7."""

    def test_a_chunk_keeps_the_window_at_its_end_and_a_block_more(self):
        manager = manager_of()
        prompt = tokens(60)
        start(manager, 0, prompt, 40)
        assert step_blocks(manager, 0, 1) == [0, 1, 2, 3, 4, 5, 6]
        assert step_blocks(manager, 0, 0) == []
        assert manager.inspect().supply.num_owned == [10, 3]
        assert manager.inspect().arena.num_used == [10, 3]
        finish(manager, 0, prompt, 40)
        rows = manager.inspect().rows
        assert rows.pages[1, 0, :10].tolist()[:7] == [NULL_PAGE] * 7
        assert (rows.first_left[1, 0], rows.first_kept[1, 0]) == (7, 8)
        assert manager.inspect().tree.page[1, rows.nodes[0, 7]] != NULL_PAGE, "left for the end"

    @pytest.mark.parametrize(("end", "kept_from"), [(40, 7), (41, 7), (43, 7), (44, 8), (13, 0), (16, 1), (20, 2)])
    def test_a_chunk_that_ends_inside_a_block_keeps_what_its_last_whole_block_needs(self, end, kept_from):
        manager = manager_of()
        start(manager, 0, tokens(60), end)
        assert step_blocks(manager, 0, 1) == [*range(kept_from)]

    def test_a_second_chunk_gives_none_for_blocks_that_are_there(self):
        """From 22 on: block 5 is there. At 60 the window and a block more begin at 56 - 8 = 48, block 12."""
        manager = manager_of()
        prompt = tokens(60)
        start(manager, 0, prompt, 22)
        finish(manager, 0, prompt, 22)
        assert manager.grow(0, 22, 38, is_prefill=True)
        assert step_blocks(manager, 0, 1) == [*range(6, 12)]
        invariants.check(manager)

    def test_chunked_local_keeps_the_chunk_of_the_block_before_the_end(self):
        """Chunks of 16: at 40 the block before begins at 36, in the chunk from 32; at 32 it is in the one from 16."""
        for end, kept_from in ((40, 8), (32, 4), (36, 8), (37, 8)):
            manager = manager_of([full(), chunked(16), chunked(16)])
            start(manager, 0, tokens(60), end)
            assert step_blocks(manager, 0, 1) == [*range(kept_from)]

    def test_where_prompts_parted_a_window_stays_too(self):
        """The second prompt parts at 24, whose window and a block more begin at 20 - 8 = 12, block 3."""
        manager = manager_of()
        first = tokens(48)
        start(manager, 0, first, 48)
        finish(manager, 0, first, 48, ends_prompt=True)
        second = np.concatenate([tokens(24), tokens(36, 200)])
        assert start(manager, 1, second, 60) == 0
        assert step_blocks(manager, 1, 1) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
        finish(manager, 1, second, 60, ends_prompt=True)
        assert manager.match(np.concatenate([tokens(24), tokens(9, 300)])).num_tokens == 24

    def test_the_grid_stays(self):
        """Every 20 tokens: at 20 from 16 - 8 = 8 on, at 40 from 28 on, at the end from 48 on."""
        manager = manager_of(retention=RetentionPolicy("tails", 20, spare=False))
        prompt = tokens(60)
        start(manager, 0, prompt, 60)
        assert step_blocks(manager, 0, 1) == [0, 1, 5, 6, 10, 11]
        finish(manager, 0, prompt, 60, ends_prompt=True)
        for shared in (20, 40):
            assert manager.match(np.concatenate([tokens(shared), tokens(9, 300)])).num_tokens == shared

    def test_where_every_block_end_stays_there_are_none(self):
        manager = manager_of(retention=RetentionPolicy("all"))
        start(manager, 0, tokens(60), 60)
        assert step_blocks(manager, 0, 1) == []

    def test_decodes_have_none(self):
        manager = manager_of()
        start(manager, 0, tokens(60), 10)
        finish(manager, 0, tokens(60), 10)
        assert manager.grow(0, 10, 30, is_prefill=False)
        assert step_blocks(manager, 0, 1) == []

    def test_idle_memory_is_used_instead(self):
        """10 full and 10 sliding pages are 480 B: 15 slabs of 32 B beside the null slab. What nobody needs after the
        step stays as spare pages."""
        for num_slabs, expected in ((16, []), (15, [0, 1, 2, 3, 4, 5, 6])):
            manager = manager_of(num_slabs=num_slabs, retention=RetentionPolicy(), never_idle=False)
            start(manager, 0, tokens(60), 40)
            assert step_blocks(manager, 0, 1) == expected
            finish(manager, 0, tokens(60), 40)
            assert len(manager.inspect().tree.spare) == 7 - len(expected)

    def test_what_the_region_does_not_hold_gets_pages(self):
        manager = manager_of(step_tokens=16)
        prompt = tokens(60)
        start(manager, 0, prompt, 40)
        assert step_blocks(manager, 0, 1) == [0, 1, 2, 3]
        assert manager.inspect().supply.num_owned == [10, 6]
        assert manager.inspect().chunks.num_passing == {0: [0, 3]}
        start(manager, 1, tokens(60, 100), 40)
        assert step_blocks(manager, 1, 1) == []
        finish(manager, 0, prompt, 40)
        assert manager.inspect().chunks.num_passing == {}

    def test_memory_that_is_not_to_be_had_takes_no_step_pages(self):
        """9 slabs hold 6 of the 10 full pages in 3, and 3 sliding ones; 5 + 3 is one slab more than 7."""
        manager = manager_of(num_slabs=8)
        assert manager.begin(0, manager.match(tokens(60)))
        assert not manager.grow(0, 0, 40, is_prefill=True)
        assert step_blocks(manager, 0, 1) == []
        assert manager.inspect().step_pages.num_left(1) == 16
        invariants.check(manager)

    def test_two_requests_of_a_step_have_different_ones(self):
        manager = manager_of()
        for row in range(2):
            start(manager, row, tokens(40, 100 * row), 40)
        pages = [
            manager.inspect().rows.pages[1, row, block] for row in range(2) for block in step_blocks(manager, row, 1)
        ]
        assert len(set(pages)) == 14

    @pytest.mark.parametrize("spec", [sliding(1), sliding(9), sliding(20), chunked(8), chunked(21)], ids=str)
    @pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
    def test_what_a_chunk_holds_is_within_what_sizing_says(self, spec, page_tokens):
        specs = [full(), spec, spec]
        held = held_chunk_tokens(
            build_layout(specs, page_tokens=page_tokens), chunk_tokens=90,
            step_pages_bytes=region_bytes(build_layout(specs, page_tokens=page_tokens), 96),
        )  # fmt: skip
        assert held == min(90, spec.reach_tokens + 2 * page_tokens)
        bound = spec.max_prefill_pages(page_tokens=page_tokens, chunk_tokens=held, max_model_len=120)
        for first in range(1, 31):
            manager = manager_of(specs, page_tokens=page_tokens, num_slabs=400, step_tokens=96)
            prompt = tokens(120)
            start(manager, 0, prompt, first)
            finish(manager, 0, prompt, first)
            assert manager.grow(0, first, 90, is_prefill=True)
            assert manager.inspect().supply.num_owned[1] <= bound

    def test_sizing_counts_the_chunk_where_the_region_does_not_hold_it(self):
        layout = build_layout(HYBRID, page_tokens=4)
        room = region_bytes(layout, 64)
        chunks = [held_chunk_tokens(layout, chunk_tokens=chunk, step_pages_bytes=room) for chunk in (20, 64, 65)]
        assert chunks == [17, 17, 65]
        assert held_chunk_tokens(layout, chunk_tokens=64, step_pages_bytes=0) == 64


class TestNobodys:
    def test_the_region_is_free_again_after_the_step(self):
        """20 tokens of 4 chunks each; all get what the first got."""
        manager = manager_of(step_tokens=20)
        prompt = tokens(100)
        for end in (40, 60, 80, 100):
            num_computed = int(manager.inspect().rows.num_filled[0]) * 4
            if end == 40:
                start(manager, 0, prompt, 40)
            else:
                assert manager.grow(0, num_computed, end - num_computed, is_prefill=True)
            first = num_computed // 4
            assert step_blocks(manager, 0, 1) == [*range(first, min(first + 5, end // 4 - 3))]
            finish(manager, 0, prompt, end)
            assert manager.inspect().step_pages.num_left(1) == 5

    def test_the_tree_has_tombstones(self):
        manager = manager_of()
        prompt = tokens(60)
        start(manager, 0, prompt, 40)
        path = manager.inspect().rows.nodes[0, :10]
        assert manager.inspect().tree.page[1, path].tolist()[:7] == [NULL_PAGE] * 7
        assert (manager.inspect().tree.page[1, path[7:]] != NULL_PAGE).all()
        assert manager.match(np.concatenate([tokens(24), tokens(9, 300)])).num_tokens == 0
        assert manager.match(np.concatenate([tokens(40), tokens(9, 300)])).num_tokens == 40

    @pytest.mark.parametrize("how", ["roll_back", "release"])
    def test_a_step_that_fails_leaves_nothing(self, how):
        manager = manager_of()
        prompt = tokens(60)
        start(manager, 0, prompt, 20)
        finish(manager, 0, prompt, 20)
        manager.slide([0], [20], [0])
        before = manager.usage()
        assert manager.grow(0, 20, 40, is_prefill=True)
        manager.commit_ahead(0, prompt, 60)
        assert step_blocks(manager, 0, 1)
        if how == "roll_back":
            assert manager.roll_back(0, 20) == 20
            assert manager.usage() == before
        else:
            manager.roll_back(0, 20)
            manager.release(0, prompt, 20)
            assert manager.match(prompt).num_tokens == 20
        assert step_blocks(manager, 0, 1) == []
        assert manager.inspect().step_pages.num_left(1) == 16
        invariants.check(manager)

    def test_others_keep_theirs_when_a_row_leaves(self):
        manager = manager_of()
        for row in range(2):
            start(manager, row, tokens(40, 100 * row), 40)
        kept = manager.inspect().rows.pages[1, 1].tolist()
        manager.roll_back(0, 0)
        manager.release(0, tokens(40), 0, keep=False)
        assert manager.inspect().step_pages.num_left(1) == 2
        assert manager.inspect().rows.pages[1, 1].tolist() == kept
        invariants.check(manager)

    def test_compaction_leaves_them_alone(self):
        """Slabs of two full pages or one sliding one are emptied in turn; step page ids stay what they are."""
        manager = manager_of([full(), full(), sliding(9)], num_slabs=60)
        for row, num_tokens in ((0, 12), (1, 12)):
            start(manager, row, tokens(num_tokens, 100 * row), num_tokens)
            finish(manager, row, tokens(num_tokens, 100 * row), num_tokens)
        start(manager, 2, tokens(40, 300), 40)
        kept = manager.inspect().rows.pages[1, 2, :7].tolist()
        manager.release(0, tokens(12), 12, keep=False)
        while manager.inspect().supply.compact(1, []) or manager.inspect().supply.compact(0, []):
            pass
        assert manager.inspect().supply.num_slab_moves > 0
        assert manager.inspect().rows.pages[1, 2, :7].tolist() == kept
        invariants.check(manager)


# Layer 6 reads what layer 1 wrote, after layer 5 has written: only the group of layer 5 has step pages. Layer 7 keeps
# every token's KV, so that layer 6 has to read for all of them.
READ_LATER = ([sliding(5), sliding(5), full(), sliding(5), full(), sliding(9), sliding(5), full(2)], {3: 1, 4: 2, 6: 1})
STACKS = [
    (HYBRID, None),
    ([sliding(5), full(), sliding(5), chunked(8), sliding(12, 2)], None),
    READ_LATER,
    ([sliding(5), sliding(5), full(2), chunked(6), chunked(6)], {4: 3}),
    ([sliding(6), sliding(6)], None),
]


@pytest.mark.parametrize(("specs", "kv_sharing"), STACKS, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("never_idle", [True, False])
def test_tight_memory_gives_what_the_prompts_foretell(page_tokens, specs, kv_sharing, never_idle):
    draw = random.Random(page_tokens)
    simulation = Simulation(
        specs, page_tokens=page_tokens, max_model_len=160, chunk_tokens=90, extra_slabs=6, step_tokens=90,
        never_idle=never_idle, kv_sharing=kv_sharing, windowed_replay=False,
    )  # fmt: skip
    base = [draw.randrange(50) for _ in range(120)]
    prompts = [
        [*base[: draw.randint(0, 110)], *(draw.randrange(50) for _ in range(draw.randint(1, 30)))] for _ in range(16)
    ]
    for index, prompt in enumerate(prompts):
        simulation.add(f"r{index}", prompt, 8)
        for _ in range(draw.randint(0, 3)):
            simulation.step(fail=draw.random() < 0.1)
    run_all(simulation)
    for index, prompt in enumerate(prompts):
        assert simulation.outputs[f"r{index}"] == foretell(None, prompt, 8)
    if never_idle:
        assert simulation.executor.num_step_page_tokens > 0
        # Under a last layer of full attention every token's KV is needed.
        assert (simulation.executor.num_unwritten_entries > 0) == specs[-1].is_windowed
    assert all(usage.owned == 0 for usage in simulation.manager.usage().values())


def test_prompts_are_found_again_where_they_end_and_where_they_part():
    """Hits are as without step pages: the third prompt that parts at 40 finds that place, and the next turn finds all
    of the turn before."""
    simulation = Simulation(
        HYBRID, page_tokens=4, max_model_len=120, chunk_tokens=100, step_tokens=100, never_idle=True,
        windowed_replay=False,
    )  # fmt: skip
    prompts = [[*range(40), *[41 + index] * 30] for index in range(3)]
    assert [serve(simulation, prompt, 5) for prompt in prompts] == [0, 0, 40]
    assert simulation.executor.num_step_page_tokens > 100
    answer = foretell(None, prompts[0], 5)
    assert serve(simulation, [*prompts[0], *answer, 1, 2]) == 74, "the last token of the answer was never computed"


def test_a_preempted_prefill_resumes_where_it_was():
    simulation = Simulation(
        HYBRID, page_tokens=4, max_model_len=120, chunk_tokens=40, step_tokens=40, never_idle=True,
        windowed_replay=False,
    )  # fmt: skip
    prompt = [(7 * index) % 50 for index in range(110)]
    request = simulation.add("r", prompt, 3)
    simulation.step()
    simulation.scheduler._preempt(request.row)
    assert simulation.manager.match(request.token_ids).num_tokens == 40
    assert simulation.manager.match(np.array([*prompt[:38], 49, 49], np.int32)).num_tokens == 38
    run_all(simulation)
    assert simulation.outputs["r"] == foretell(None, prompt, 3)


def test_idle_memory_that_is_not_to_be_had_leaves_the_step_pages():
    """By its bytes enough memory idles, but 9 slabs hold at most 4 sliding pages beside 10 full ones."""
    manager = manager_of(num_slabs=10, never_idle=False)
    manager.inspect().supply.idle_bytes = lambda: 480
    start(manager, 0, tokens(60), 40)
    assert step_blocks(manager, 0, 1) == [0, 1, 2, 3, 4, 5, 6]


def test_spare_pages_are_idle():
    """20 slabs; a first prompt leaves 5 to its full pages, 3 to its window and 7 to spare pages. The next one's 8 full
    and 8 sliding pages, 12 slabs, are as much as idles."""
    manager = manager_of(num_slabs=21, retention=RetentionPolicy(), never_idle=False)
    start(manager, 0, tokens(40), 40)
    assert step_blocks(manager, 0, 1) == []
    finish(manager, 0, tokens(40), 40, ends_prompt=True)
    manager.release(0, tokens(40), 40)
    assert manager.inspect().arena.num_free_slabs == 5
    assert len(manager.inspect().tree.spare) == 7
    assert manager.inspect().supply.idle_bytes() == (5 + 7) * 32
    start(manager, 0, tokens(32, 100), 32)
    assert step_blocks(manager, 0, 1) == []
    assert manager.inspect().tree.num_evicted_resume_points == 0


@pytest.mark.parametrize(("num_slabs", "starts"), [(16, True), (15, False)])
def test_a_chunk_in_flight_is_no_claim(num_slabs, starts):
    """The first request's chunk of 40 tokens has 10 full pages and 10 sliding ones, of which 7 are back after the step:
    with the full page of its first answer it claims 11 of 16 B and 3 of 32 B, 272 B. The second, of 27 tokens and one
    more, wants 7 full pages and ceil((9 + 4 + 2) / 4) = 4 sliding ones if its chunks are small, 240 B. 16 slabs of
    32 B are just enough."""
    manager = manager_of(num_slabs=1 + num_slabs, step_tokens=0)
    rows = RequestRows(3, 64)
    assert manager.begin(0, manager.match(tokens(40)))
    assert manager.grow(0, 0, 40, is_prefill=True)
    assert manager.inspect().supply.num_owned == [10, 10]
    rows.put(request_of(tokens(40)), 0)
    assert Admission(manager, rows).has_room(request_of(tokens(27, 100)), NO_MATCH, [0], 1) is starts
