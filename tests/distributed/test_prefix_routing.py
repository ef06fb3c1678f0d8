"""Prompts that begin alike meet, and nobody gets much more than a share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lamella.distributed.prefix_routing import PrefixRouter, deal_subtrees
from lamella.errors import ConfigError

CLOSED = float("inf")


def tree_of_prompts(seed: int, num_roots: int, num_prompts: int, shared: int = 64, own: int = 16) -> list[np.ndarray]:
    """Prompts in a random order, each one of `num_roots` beginnings and an end of its own."""
    generator = np.random.default_rng(seed)
    roots = generator.integers(0, 1000, size=(num_roots, shared), dtype=np.int32)
    chosen = generator.integers(0, num_roots, size=num_prompts)
    ends = generator.integers(0, 1000, size=(num_prompts, own), dtype=np.int32)
    return [np.concatenate([roots[root], end]) for root, end in zip(chosen, ends, strict=True)]


def distinct_tokens(prompts: list[np.ndarray]) -> int:
    """Tokens that one cache computes: nodes of the prompts' trie, by a set of all beginnings."""
    return len({prompt[:length].tobytes() for prompt in prompts for length in range(1, len(prompt) + 1)})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_each_prompt_is_dealt_once_and_shares_are_fair(seed: int, num_replicas: int) -> None:
    prompts = tree_of_prompts(seed, 30, 200)
    outputs = [20.0] * len(prompts)
    dealt, loads = deal_subtrees(prompts, outputs, [0.0] * num_replicas)
    assert sorted(place for own in dealt for place in own) == list(range(len(prompts)))
    work = [distinct_tokens([prompts[place] for place in own]) + 20 * len(own) for own in dealt]
    assert loads == work  # as each beginning is one replica's
    assert max(work) < 1.2 * sum(work) / num_replicas
    assert sum(work) - 20 * len(prompts) == distinct_tokens(prompts)  # no prefix is computed twice


def test_one_large_tree_is_taken_apart_at_its_forks() -> None:
    """All prompts begin alike; the second part is what tells them apart. Each replica computes the first part once."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, 1000, size=100, dtype=np.int32)
    prompts = [np.concatenate([first, prompt]) for prompt in tree_of_prompts(1, 16, 160)]
    dealt, _ = deal_subtrees(prompts, [8.0] * 160, [0.0] * 4)
    distinct = [distinct_tokens([prompts[place] for place in own]) for own in dealt]
    assert sum(distinct) == distinct_tokens(prompts) + 3 * 100
    counts = [len(own) for own in dealt]
    assert max(counts) < 1.5 * 160 / 4


def test_many_leaves_of_one_fork_are_dealt_in_pieces() -> None:
    prompts = tree_of_prompts(2, 1, 100)
    dealt, _ = deal_subtrees(prompts, [10.0] * 100, [0.0] * 4)
    assert sorted(place for own in dealt for place in own) == list(range(100))
    assert max(len(own) for own in dealt) <= 50
    assert min(len(own) for own in dealt) > 0


def test_loads_and_closed_replicas_count() -> None:
    prompts = tree_of_prompts(3, 40, 80)
    dealt, loads = deal_subtrees(prompts, [10.0] * 80, [CLOSED, 3000.0, 0.0])
    assert dealt[0] == []
    assert len(dealt[1]) < len(dealt[2])
    assert loads[0] == CLOSED
    assert deal_subtrees([], [], [0.0, 1.0]) == ([[], []], [0.0, 1.0])


def test_neighbours_in_the_tree_are_neighbours_in_the_queue() -> None:
    prompts = tree_of_prompts(4, 6, 60)
    (queue,), _ = deal_subtrees(prompts, [1.0] * 60, [0.0])
    changes = sum(prompts[a][0] != prompts[b][0] for a, b in itertools.pairwise(queue))
    assert changes == len({int(prompt[0]) for prompt in prompts}) - 1


def test_a_router_sends_like_prompts_to_one_place() -> None:
    router = PrefixRouter(4, key_tokens=16)
    prompts = tree_of_prompts(5, 12, 300)
    places: dict[bytes, set[int]] = {}
    loads = [0.0] * 4
    for prompt in prompts:
        places.setdefault(prompt[:16].tobytes(), set()).add(router.choose(router.key(prompt), loads))
    assert {len(each) for each in places.values()} == {1}
    assert len({place for each in places.values() for place in each}) == 4


def test_no_load_is_far_above_the_mean() -> None:
    """All prompts begin alike, so that without a bound one replica would get them all."""
    router = PrefixRouter(4, key_tokens=16, most_load=1.25)
    loads = [0.0] * 4
    for prompt in tree_of_prompts(6, 1, 400):
        loads[router.choose(router.key(prompt), loads)] += 1
    assert sum(loads) == 400
    assert max(loads) <= 1.25 * 100 + 2


def test_a_replica_more_moves_few_prompts() -> None:
    keys = range(0, 2**64, 2**64 // 2000)
    before, after = PrefixRouter(9, key_tokens=4), PrefixRouter(10, key_tokens=4)
    moved = sum(before.choose(key, [0.0] * 9) != after.choose(key, [0.0] * 10) for key in keys)
    assert 0 < moved < 2.5 * 2000 / 10


def test_salts_and_lost_replicas() -> None:
    router = PrefixRouter(2, key_tokens=4)
    assert router.key([1, 2, 3, 4, 5]) == router.key([1, 2, 3, 4, 9]) != router.key([1, 2, 3, 4, 5], "salt")
    key = router.key([1, 2, 3])
    router.remember(key, 1)
    assert router.choose(key, [0.0, 0.0]) == 1
    assert router.choose(key, [0.0, CLOSED]) == 0
    router.remember(key, 1)
    router.forget(1)
    assert router.choose(key, [0.0, 0.0]) == PrefixRouter(2, key_tokens=4).choose(key, [0.0, 0.0])
    with pytest.raises(ConfigError, match="num_replicas=0"):
        PrefixRouter(0, key_tokens=4)
