"""What rows give to the tree: which blocks, whose pages, and what a place to resume holds."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.kv_cache.arena import NULL_PAGE
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.simulation import chunked, full, sliding

HYBRID = [full(), sliding(9)]


def path_of(parts, tokens: np.ndarray) -> list[int]:
    """Nodes of the blocks of these tokens, found one by one; the last may be short."""
    node, path = parts.tree.root(None), []
    for start in range(0, len(tokens), 4):
        node = parts.tree.child(node, tokens[start : start + 4].astype(np.int32).tobytes())
        path.append(node)
    return path


@pytest.mark.parametrize("num_tokens", [3, 4, 11, 12, 30, 33])
def test_whole_blocks_enter_the_tree_with_the_rows_pages(num_tokens):
    parts, tokens = make_parts(HYBRID), tokens_of(num_tokens)
    occupy(parts, 0, num_tokens)
    before = parts.rows.pages[:, 0].copy()
    parts.commits.commit(0, tokens, num_tokens)
    whole = num_tokens // 4
    path = path_of(parts, tokens[: 4 * whole])
    assert -1 not in path
    assert parts.rows.nodes[0, :whole].tolist() == path
    assert parts.tree.page[:, path].tolist() == before[:, :whole].tolist()
    assert parts.tree.refs[:, path].tolist() == [[1] * whole] * 2
    assert int(parts.rows.num_committed[0]) == int(parts.rows.num_filled[0]) == whole
    assert sum(1 for _ in parts.tree.nodes()) == whole


def test_what_the_tree_has_is_shared_and_the_own_page_is_free():
    parts, tokens = make_parts(HYBRID), tokens_of(16)
    for row in (0, 1):
        occupy(parts, row, 16)
        parts.commits.commit(row, tokens, 16)
    assert parts.rows.pages[:, 1].tolist() == parts.rows.pages[:, 0].tolist()
    assert parts.tree.refs[:, path_of(parts, tokens)].tolist() == [[2] * 4] * 2
    assert parts.supply.num_owned == parts.arena.num_used == [4, 4]


def test_a_tombstone_gets_the_rows_page():
    """Row 0 slid past two blocks before they were committed; row 1 has computed them again."""
    parts, tokens = make_parts(HYBRID), tokens_of(20)
    occupy(parts, 0, 20)
    parts.windows.slide(0, 17, 17, at_once=True)
    parts.commits.commit(0, tokens, 20)
    path = path_of(parts, tokens)
    assert (parts.tree.page[1, path] == NULL_PAGE).tolist() == [True, True, False, False, False]
    occupy(parts, 1, 20)
    own = parts.rows.pages[1, 1].copy()
    parts.commits.commit(1, tokens, 20)
    assert parts.tree.page[1, path[:2]].tolist() == own[:2].tolist()
    assert parts.tree.refs[1, path].tolist() == [1, 1, 2, 2, 2]


def test_pending_blocks_are_there_to_share_before_they_are_computed():
    parts, tokens = make_parts(HYBRID), tokens_of(10)
    occupy(parts, 0, 10)
    parts.commits.commit_ahead(0, tokens, 10)
    path = path_of(parts, tokens[:8])
    assert parts.tree.pending == set(path)
    assert int(parts.rows.num_committed[0]) == 2
    assert int(parts.rows.num_filled[0]) == 0
    assert len(parts.tree.resume_points) == 0
    parts.tree.end_pending()
    parts.commits.commit(0, tokens, 10, ends_prompt=True)
    assert int(parts.rows.num_filled[0]) == 2
    assert [*parts.tree.resume_points] == [path[-1]]


@pytest.mark.parametrize("spec", [sliding(2), sliding(9), chunked(8), chunked(12)])
@pytest.mark.parametrize("num_tokens", [5, 16, 23, 24, 37])
def test_the_end_holds_what_any_resume_in_its_last_block_sees(spec, num_tokens):
    """It holds one block more than the window: what a query sees at each position from a block before the end on."""
    parts, tokens = make_parts([full(), spec]), tokens_of(num_tokens)
    occupy(parts, 0, num_tokens)
    parts.commits.commit_end(0, tokens, num_tokens)
    path = path_of(parts, tokens)
    assert -1 not in path, "the last, partial block is there too"
    seen = {
        key // 4
        for position in range(max(0, num_tokens - 4), num_tokens + 1)
        for key in range(spec.first_visible(position), num_tokens)
    }
    held = {path.index(node) for _, node in parts.tree.resume_points.held(path[-1])}
    assert held == seen


def test_a_replay_that_is_not_done_leaves_nothing():
    parts, tokens = make_parts(HYBRID), tokens_of(16)
    occupy(parts, 0, 16)
    parts.rows.replay_end[0] = 16
    parts.commits.commit(0, tokens, 12)
    parts.commits.commit_end(0, tokens, 12)
    assert [*parts.tree.nodes()] == []
