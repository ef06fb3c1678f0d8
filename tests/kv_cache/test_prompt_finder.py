"""What is found of a prompt, and what is counted on, against a dictionary of all that was committed.

Blocks have 4 tokens. The oracle keeps no tree: it knows the prompts that were committed with a resume point at their
end, and looks through all of them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.pinned_prefixes import PinnedPrefixes
from lamella.kv_cache.prefix_match import NO_MATCH
from lamella.kv_cache.prompt_finder import PromptFinder
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.simulation import Simulation, full, sliding

PAGE_TOKENS = 4


def finder_of(parts) -> PromptFinder:
    pins = PinnedPrefixes(parts.layout, parts.settings, parts.tree)
    return PromptFinder(parts.layout, parts.settings, ReplayRule(parts.layout), parts.tree, pins)


def committed(specs, *prompts: np.ndarray, **options):
    """Parts whose tree has these prompts, each from a row of its own and with a resume point at its end."""
    parts = make_parts(specs, **options)
    for row, tokens in enumerate(prompts):
        occupy(parts, row, len(tokens))
        parts.commits.commit(row, tokens, len(tokens), ends_prompt=True)
    return parts


def common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_finds_the_longest_that_it_shares_with_any_in_whole_blocks(seed):
    """With full attention alone, every whole block of a committed prompt is a place to resume, and a prompt's last
    token is always computed."""
    draw = random.Random(seed)
    prompts = [np.array([draw.randrange(2) for _ in range(4 * draw.randint(2, 5))], dtype=np.int32) for _ in range(4)]
    parts = committed([full()], *prompts)
    finder = finder_of(parts)
    for _ in range(60):
        base = draw.choice(prompts)[: draw.randint(1, 20)]
        asked = np.array([*base, *(draw.randrange(2) for _ in range(draw.randint(0, 6)))], dtype=np.int32)
        shared = max(common(asked[:-1], prompt) for prompt in prompts)
        match = finder.match(asked, None)
        whole = shared // PAGE_TOKENS * PAGE_TOKENS
        assert match.num_tokens in (shared, whole), "to the token where a block can be copied, in whole blocks else"
        assert len(match.path) == match.num_tokens // PAGE_TOKENS
        assert (match.tail_node != NO_NODE) == (match.num_tokens % PAGE_TOKENS != 0)
        for index, node in enumerate(match.path):
            assert int(parts.tree.end[node]) == PAGE_TOKENS * (index + 1)


def test_another_salt_finds_nothing():
    parts = committed([full()], tokens_of(16))
    assert finder_of(parts).match(tokens_of(17), None).num_tokens == 16
    assert finder_of(parts).match(tokens_of(17), "tenant").num_tokens == 0


def test_without_prefix_caching_nothing_is_looked_for():
    parts = committed([full()], tokens_of(16), enable_prefix_caching=False)
    assert finder_of(parts).match(tokens_of(17), None) == NO_MATCH
    assert finder_of(parts).expect(tokens_of(17), None, 1) is None


def test_what_is_expected_is_what_would_be_found_with_its_bytes():
    """A page of the full group has 4 tokens of 4 bytes, and one of the two windows' group twice as many. Of 16 tokens,
    all four full pages count, and of a window of 9 the blocks from token 8 on."""
    parts = committed([full(), sliding(9), sliding(9)], tokens_of(16))
    parts.tree.refs[:] = 0  # as if the row had gone: pages that a running request uses do not count
    finder = finder_of(parts)
    expectation = finder.expect(tokens_of(17), None, 7)
    assert expectation is not None
    assert (expectation.num_tokens, expectation.rank) == (16, 7)
    assert expectation.num_bytes == 4 * 16 + 2 * 32
    assert int(parts.tree.end[expectation.node]) == 16


def test_nothing_is_expected_of_what_a_step_has_yet_to_compute():
    simulation = Simulation([full(), sliding(9)], page_tokens=4)
    simulation.add("first", range(20), 4)
    simulation.scheduler.schedule()
    assert simulation.manager.match(tokens_of(21)).num_tokens > 0
    assert simulation.manager.expect(tokens_of(21), None, 1) is None


def test_nothing_is_expected_where_no_ends_are_kept():
    specs = [full(), sliding(9)]
    parts = committed(specs, tokens_of(16), retention=RetentionPolicy("none", spare=False))
    assert finder_of(parts).expect(tokens_of(17), None, 1) is None
