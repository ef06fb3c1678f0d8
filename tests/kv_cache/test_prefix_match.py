"""Where a prompt can be resumed, against every position tried one by one from the definitions of the windows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_match import PrefixMatch, longest_resume
from tests.helpers.simulation import chunked, sliding

FIRST_NEEDED = {
    "window": lambda size, position: max(0, position - size + 1),
    "chunk": lambda size, position: position // size * size,
}


def longest_by_trying(rules, live, limit, page_tokens) -> int:
    """The largest position where a prompt can resume: every block that holds a needed key is live, and so is the block
    that the position lies inside of."""

    def is_resume(position: int) -> bool:
        for (kind, size), alive in zip(rules, live, strict=True):
            needed = set(range(FIRST_NEEDED[kind](size, position), position))
            blocks = {key // page_tokens for key in needed}
            if position % page_tokens:
                blocks.add(position // page_tokens)
            if not all(alive[block] for block in blocks):
                return False
        return True

    return next(position for position in range(limit, -1, -1) if position == 0 or is_resume(position))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_longest_of_all_positions(seed):
    draw = random.Random(seed)
    page_tokens, num_blocks = draw.choice([1, 3, 4]), draw.randint(1, 12)
    rules = [(draw.choice(["window", "chunk"]), draw.randint(1, 14)) for _ in range(draw.randint(1, 2))]
    specs = [sliding(size) if kind == "window" else chunked(size) for kind, size in rules]
    for _ in range(20):
        share = draw.choice([0.5, 0.8, 0.95])
        live = [np.array([draw.random() < share for _ in range(num_blocks)]) for _ in rules]
        limit = draw.randint(0, num_blocks * page_tokens)
        found = longest_resume(list(zip(specs, live, strict=True)), limit, page_tokens)
        assert found == longest_by_trying(rules, live, limit, page_tokens), (rules, live, limit, page_tokens)


def test_without_windows_it_is_what_is_there():
    assert longest_resume([], 17, 4) == 17


def test_a_match_is_plain_where_nothing_is_to_be_done_first():
    plain = PrefixMatch(8, [1, 2], NO_NODE, 8)
    assert plain.is_plain
    assert not plain._replace(tail_node=3).is_plain
    assert not plain._replace(num_replayed_tokens=4).is_plain
    assert not plain._replace(num_skipped_tokens=4).is_plain
