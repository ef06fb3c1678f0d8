"""Moving into a row and out of it: what the one takes, the other gives back."""

from __future__ import annotations

import pytest

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_match import NO_MATCH
from tests.helpers.cache_parts import make_parts, tokens_of
from tests.helpers.simulation import full, sliding

HYBRID = [full(), sliding(9)]


def state(parts) -> tuple:
    """All that a row can hold on to."""
    tree = parts.tree
    return (
        parts.rows.pages.tolist(), parts.rows.nodes.tolist(), parts.rows.frontier.tolist(), tree.refs.tolist(),
        tree.pins.tolist(), sorted(tree.nodes()), dict(parts.supply.copies), parts.supply.num_owned[:],
        parts.arena.num_used[:],
    )  # fmt: skip


def with_cached(num_tokens: int, **options):
    """A finished request of tokens 0, 1, ... is cached, its last partial block too."""
    parts = make_parts(HYBRID, **options)
    assert parts.occupancy.begin(0, NO_MATCH, None, 0)
    assert parts.supply.extend(0, -(-num_tokens // 4))
    parts.commits.commit_end(0, tokens_of(num_tokens), num_tokens)
    parts.occupancy.leave(0)
    assert parts.supply.num_owned == [0, 0]
    return parts


@pytest.mark.parametrize("num_shared", [3, 8, 10, 20, 22])
def test_what_a_hit_takes_is_given_back(num_shared):
    """Of 22 tokens in pages of 4; the hit ends inside a block that is copied, or between two."""
    parts = with_cached(22)
    before = state(parts)
    match = parts.tree.match(tokens_of(22)[:num_shared], None, num_shared)
    assert parts.occupancy.begin(1, match, None, 0)
    found = match.num_tokens
    assert found in (num_shared, 0)
    first_seen = max(0, found - 8) // 4  # a window of 9 sees 8 keys before its query
    whole = found // 4
    pages = parts.rows.pages[:, 1]
    assert pages[0, :whole].tolist() == parts.tree.page[0, match.path].tolist()
    assert (pages[1, first_seen:whole] != NULL_PAGE).all()
    assert (found % 4 > 0) == (1 in parts.supply.copies)
    parts.occupancy.leave(1)
    assert state(parts) == before


def test_without_memory_for_the_copy_the_row_stays_empty():
    parts = with_cached(22, num_slabs=13)
    held = [parts.arena.allocate(group, 1) for group in (0, 1) if parts.arena.num_allocatable(group)]
    while (page := parts.arena.allocate_one(0)) != NULL_PAGE:
        held.append([page])
    match = parts.tree.match(tokens_of(22), None, 22)
    assert match.tail_node != NO_NODE
    assert not parts.occupancy.begin(1, match, None, 0)
    assert parts.rows.frontier[1] == NO_NODE
    assert (parts.rows.pages[:, 1] == NULL_PAGE).all()
    assert not parts.tree.refs.any()
    assert not parts.tree.pins.any()
    assert not parts.supply.copies


def test_a_failed_step_takes_back_what_it_was_to_complete():
    """11 tokens are computed, a chunk to 26 was planned: two whole blocks stay, and not the third, half done."""
    parts = make_parts(HYBRID)
    assert parts.occupancy.begin(0, NO_MATCH, None, 0)
    assert parts.supply.extend(0, 3)
    parts.commits.commit(0, tokens_of(11), 11)
    nodes = sorted(parts.tree.nodes())
    assert parts.supply.extend(0, 7)
    parts.commits.commit_ahead(0, tokens_of(26), 26)
    assert len(parts.tree.pending) == 4
    assert parts.occupancy.roll_back(0, 11) == 8
    assert parts.tree.pending == set()
    assert sorted(parts.tree.nodes()) == nodes
    assert int(parts.rows.num_blocks[0]) == int(parts.rows.num_committed[0]) == 2
    assert parts.rows.frontier[0] == parts.rows.nodes[0, 1]
    assert parts.supply.num_owned == parts.arena.num_used == [2, 2]
    assert (parts.rows.pages[:, 0, 2:] == NULL_PAGE).all()


def test_nothing_of_an_unfinished_replay_is_kept():
    parts = with_cached(16)
    match = parts.tree.match(tokens_of(17), None, 16)
    assert parts.occupancy.begin(1, match, None, 0)
    parts.rows.replay_end[1] = 16
    before = state(parts)
    assert parts.occupancy.roll_back(1, 16) == 0
    assert state(parts) == before, "it is to be released, not rolled back"


def test_a_row_in_use_is_not_given_away():
    parts = make_parts(HYBRID)
    assert parts.occupancy.begin(0, NO_MATCH, None, 0)
    with pytest.raises(AssertionError, match="row 0 is in use"):
        parts.occupancy.begin(0, NO_MATCH, None, 0)
