"""Questions about memory: answers by hand, and by counting what rows name."""

from __future__ import annotations

import random
import sys

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.prefix_match import NO_MATCH
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.simulation import full, sliding

HYBRID = [full(), sliding(9)]  # 16 bytes a page each, one page to a slab


def test_what_is_at_stake_is_what_no_other_row_names():
    draw = random.Random(5)
    for _ in range(40):
        parts = make_parts(HYBRID, num_slabs=90)
        lengths = [draw.randint(1, 40) for _ in range(3)]
        common = draw.choice([0, 4, 8, 20])
        for row, num_tokens in enumerate(lengths):
            occupy(parts, row, num_tokens)
            if draw.random() < 0.5:
                parts.windows.slide(row, num_tokens, num_tokens, at_once=True)
            own = tokens_of(num_tokens, 100 * row)
            own[:common] = tokens_of(num_tokens)[:common]
            parts.commits.commit(row, own, num_tokens)
        named = [
            {(group, page) for group in (0, 1) for page in parts.rows.pages[group, row].tolist() if page != NULL_PAGE}
            for row in range(3)
        ]
        for row, num_tokens in enumerate(lengths):
            others = set.union(*(named[other] for other in range(3) if other != row))
            blocks = parts.rows.pages[:, row].T.tolist()
            shared = [block for block, pages in enumerate(blocks) if not others.isdisjoint(enumerate(pages))]
            stake = parts.outlook.stake(row, num_tokens)
            assert stake.num_pages == len(named[row] - others)
            assert stake.num_tokens == max(0, num_tokens - 4 * (max(shared, default=-1) + 1))


def test_demand_counts_what_is_held_what_grows_and_what_is_to_come():
    """Row 0 has 13 of 20 tokens: 4 full pages, and 3 windowed ones since it slid. A request of 9 tokens more needs 3
    full pages and, decoding with a window of 9 and a block of slack, its 3 windowed ones."""
    parts = make_parts(HYBRID, num_slabs=20)
    occupy(parts, 0, 13)
    parts.windows.slide(0, 13, 13, at_once=True)
    assert parts.supply.num_owned == [4, 3]
    assert parts.outlook.demand(9, NO_MATCH, []) == (16 * (7 + 6), 16 * 19, None)
    assert parts.outlook.demand(9, NO_MATCH, [(0, 20)]) == (16 * (7 + 1 + 6), 16 * 19, None)
    parts.chunks.num_passing[0] = [0, 2]
    assert parts.outlook.demand(9, NO_MATCH, []).num_bytes == 16 * (7 + 4), "what comes back after the step is no claim"


def test_demand_of_fixed_pools_is_told_group_by_group():
    """One page of each group is held, and three of each are wanted."""
    for quota, fits in (((4, 4), True), ((3, 6), False), ((6, 3), False)):
        parts = make_parts(HYBRID, num_slabs=11, slab_quota=quota)
        occupy(parts, 0, 4)
        assert parts.outlook.demand(9, NO_MATCH, []).fits_pools is fits


def test_what_others_hold_already_costs_nothing():
    parts, tokens = make_parts(HYBRID, num_slabs=20), tokens_of(12)
    occupy(parts, 0, 12)
    parts.commits.commit(0, tokens, 12)
    match = parts.tree.match(tokens_of(13), None, 12)
    assert len(match.path) == 3
    alone = parts.outlook.demand(13, NO_MATCH, []).num_bytes
    assert alone - parts.outlook.demand(13, match, []).num_bytes == 16 * 3


def test_a_chunk_may_be_as_long_as_idle_memory_holds_of_its_sliding_kv():
    parts = make_parts(HYBRID, num_slabs=20)
    assert parts.outlook.prefill_room(0) == 4 * 19
    occupy(parts, 0, 32)
    assert parts.outlook.prefill_room(0) == 4 * (19 - 16)
    assert parts.outlook.prefill_room(0.5) == 4 * 9, "half of the arena's 19 pages"
    assert make_parts([full()]).outlook.prefill_room(0) == sys.maxsize


def test_expected_places_are_counted_but_for_the_own():
    parts = make_parts(HYBRID, num_slabs=40)
    for row, first in ((0, 0), (1, 100)):
        occupy(parts, row, 12)
        parts.commits.commit(row, tokens_of(12, first), 12, ends_prompt=True)
    assert parts.outlook.expected(NO_MATCH) == (0, 0, 0, 0)
    ends = [int(parts.rows.frontier[row]) for row in (0, 1)]
    for node, num_bytes, count in ((ends[0], 48, 2), (ends[1], 64, 1)):
        for rank in range(count):
            parts.tree.resume_points.expect(Expectation(node, rank, 12, num_bytes))
    assert parts.outlook.expected(NO_MATCH) == (2, 3, 24, 112)
    match = parts.tree.match(tokens_of(13), None, 12)
    assert match.path[-1] == ends[0]
    assert parts.outlook.expected(match) == (2, 3, 24, 64)
