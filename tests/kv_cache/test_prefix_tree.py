"""Matching and lifetimes of the prefix tree, on trees built by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_tree import PrefixTree
from tests.helpers.fake_executor import keys_seen
from tests.helpers.simulation import chunked, full, kind_of, sliding


class Bench:
    """A tree over numbered pages; `freed` collects what it lets go."""

    def __init__(self, specs, page_tokens=2):
        self.freed: list[tuple[int, int]] = []
        self.tree = PrefixTree(
            tuple(specs), page_tokens=page_tokens, free_page=lambda group, page: self.freed.append((group, page))
        )
        self._next_page = 0

    def chain(self, token_ids, flags=None, salt=None):
        """Blocks of `token_ids` (the last may be short) with pages: full groups always, windowed groups
        where `flags` says so. The end is a resume point that holds the windowed pages."""
        tree = self.tree
        node, nodes, given = tree.root(salt), [], []
        tokens = np.asarray(token_ids, dtype=np.int32)
        for index in range(0, len(tokens), tree.page_tokens):
            key = tokens[index : index + tree.page_tokens].tobytes()
            child = tree.child(node, key)
            node = child if child != NO_NODE else tree.insert(node, key)
            nodes.append(node)
            live = flags is None or flags[index // tree.page_tokens]
            for group, spec in enumerate(tree.specs):
                if tree.page[group, node] == NULL_PAGE and (live or not spec.is_windowed):
                    tree.give_page(group, node, self._next_page)
                    given.append((group, node))
                    self._next_page += 1
        held = [(g, n) for g in tree.windowed_groups for n in nodes if tree.page[g, n] != NULL_PAGE]
        tree.add_resume_point(nodes[-1], held)
        for group, node in given:  # the request is done
            tree.unlock(group, node)
        return nodes

    def match(self, token_ids, salt=None, limit=None):
        ids = np.asarray(token_ids, dtype=np.int32)
        return self.tree.match(ids, salt, len(ids) if limit is None else limit)


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ("FFFFFFFFFF", 0), ("T", 1), ("TF", 1), ("TT", 2), ("TTF", 2), ("TTT", 3), ("TTTF", 3),
        ("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8),
    ],
)  # fmt: skip
def test_sliding_window_hits_of_window_4_page_2(flags, blocks):
    bench = Bench([full(), sliding(4)])
    prompt = range(100, 100 + 2 * len(flags))
    bench.chain(prompt, [flag == "T" for flag in flags])
    assert bench.match(prompt).num_tokens == 2 * blocks
    assert bench.match(prompt).num_structural_tokens == len(prompt)


@pytest.mark.parametrize(("flags", "blocks"), [("TF", 2), ("TTF", 2), ("TTT", 3), ("TTTF", 4), ("FFT", 3), ("FFFF", 4)])
def test_chunked_local_hits_of_chunk_4_page_2(flags, blocks):
    """At a chunk's end nothing is needed, so TF, whose dead block is complete, resumes after it."""
    bench = Bench([full(), chunked(4)])
    prompt = range(2 * len(flags))
    bench.chain(prompt, [flag == "T" for flag in flags])
    assert bench.match(prompt).num_tokens == 2 * blocks


def longest_resume_by_trying(specs, page_tokens, alive, limit):
    for h in range(limit, 0, -1):
        blocks = {h // page_tokens} if h % page_tokens else set()
        for spec in specs:
            if spec.is_windowed:
                needed = {k for k in keys_seen(*kind_of(spec), h) if k < h}
                if not all(alive[block] for block in blocks | {k // page_tokens for k in needed}):
                    break
        else:
            return h
    return 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=16),
    st.sampled_from([1, 2, 3, 4]),
    st.lists(
        st.sampled_from([full(), sliding(1), sliding(3), sliding(6), chunked(4), chunked(3)]), min_size=1, max_size=3
    ),
    st.integers(0, 3),
)
def test_match_is_the_longest_resume_point(alive, page_tokens, specs, short):
    bench = Bench(specs, page_tokens)
    prompt = list(range(7, 7 + page_tokens * len(alive)))
    bench.chain(prompt, alive)
    asked = prompt[: len(prompt) - min(short, len(prompt) - 1)]
    expected = longest_resume_by_trying(specs, page_tokens, alive, len(asked))
    assert bench.match(asked).num_tokens == expected


def test_a_hit_ends_inside_a_block_where_the_prompts_part():
    bench = Bench([full(), sliding(4)], page_tokens=4)
    nodes = bench.chain([1, 2, 3, 4, 5, 6, 7, 8])
    match = bench.match([1, 2, 3, 4, 5, 6, 9, 9])
    assert (match.num_tokens, match.path, match.tail_node) == (6, nodes[:1], nodes[1])
    short_leaf = bench.chain([1, 2, 3, 4, 5, 6, 9])[-1]
    match = bench.match([1, 2, 3, 4, 5, 6, 9, 9])
    assert (match.num_tokens, match.tail_node) == (7, short_leaf)
    assert bench.match([1, 2, 3, 4, 5, 6, 7, 8], limit=7).num_tokens == 7


def test_salts_never_meet():
    bench = Bench([full()])
    bench.chain([1, 2, 3, 4], salt="a")
    assert bench.match([1, 2, 3, 4], salt="a").num_tokens == 4
    for other in (None, "b", "", "a "):
        assert bench.match([1, 2, 3, 4], salt=other).num_tokens == 0


def test_evicting_a_resume_point_keeps_what_others_need():
    """The older resume point lies on the path of the newer: only its window pages go."""
    bench = Bench([full(), sliding(3)])
    tree = bench.tree
    first = bench.chain([1, 2, 3, 4])
    window_pages = [(1, int(tree.page[1, node])) for node in first]
    longer = bench.chain([1, 2, 3, 4, 5, 6, 7, 8], [False, False, True, True])
    tree.add_resume_point(longer[-1], [(1, node) for node in longer[2:]])
    assert tree.evict_one()
    assert sorted(bench.freed) == sorted(window_pages)
    assert bench.match(range(1, 9)).num_tokens == 8
    assert bench.match([1, 2, 3, 4]).num_tokens == 0, "a tombstone is no resume point"
    assert tree.evict_one()
    assert list(tree.nodes()) == [], "dead full pages go up the chain"
    assert len(bench.freed) == 2 + 4 + 2
    assert tree.roots() == {}, "an unused root is forgotten"
    assert not tree.evict_one()


def test_without_windows_eviction_takes_one_block_at_a_time():
    bench = Bench([full()])
    bench.chain([1, 2, 3, 4, 5, 6])
    assert bench.tree.evict_one()
    assert bench.match([1, 2, 3, 4, 5, 6]).num_tokens == 4
    assert bench.tree.evict_one()
    assert bench.tree.evict_one()
    assert not bench.tree.evict_one()
    assert len(bench.freed) == 3


def test_least_recently_used_goes_first():
    bench = Bench([full()])
    ends = [bench.chain([10 * branch, 10 * branch + 1])[-1] for branch in range(3)]
    bench.tree.touch(ends[0])
    for survivors in ([0, 2], [0], []):
        bench.tree.evict_one()
        assert [b for b in range(3) if bench.match([10 * b, 10 * b + 1]).num_tokens] == survivors


def test_locked_pages_outlive_their_resume_point():
    bench = Bench([full(), sliding(3)])
    node = bench.chain([1, 2])[0]
    bench.tree.lock(0, node)
    bench.tree.lock(1, node)
    assert not bench.tree.evict_one(), "nothing that eviction could free"
    bench.tree.unlock(1, node)
    assert bench.freed == [], "the resume point still holds it"
    assert bench.tree.evict_one()
    assert [group for group, _ in bench.freed] == [1]
    bench.tree.unlock(0, node)
    assert [group for group, _ in bench.freed] == [1, 0]


def test_windows_go_alone_only_where_they_can_be_replayed():
    """Two places of 2 and of 6 tokens; from 4 tokens on a replay pays. Full KV that nothing can use would stay dead."""
    bench = Bench([full(), sliding(3)])
    bench.chain([10, 11])
    bench.chain(range(6))

    def strip():
        return bench.tree.strip_one(lambda num_tokens: num_tokens >= 4)

    assert strip()
    assert sorted(group for group, _ in bench.freed) == [0, 1], "the short one goes with its full page"
    assert strip()
    assert [group for group, _ in bench.freed[2:]] == [1, 1, 1], "of the long one only the windows"
    assert len(bench.match(range(6)).whole_path) == 3
    assert not strip(), "no windows are left"


def test_a_chain_is_like_one_block_after_the_other():
    """Same parents, ends and look-ups, so that matches agree; where it starts beside another child, inside it too."""
    blocks = [np.array(pair, dtype=np.int32).tobytes() for pair in ([1, 2], [3, 4], [1, 2], [5, 6])]
    one_by_one, at_once = Bench([full()]), Bench([full()])
    for bench in (one_by_one, at_once):
        assert bench.chain([1, 9, 7, 7]) == [1, 2]
    parent = one_by_one.tree.root(None)
    nodes = []
    for tokens in blocks:
        nodes.append(one_by_one.tree.insert(nodes[-1] if nodes else parent, tokens))
    assert at_once.tree.insert_chain(parent, blocks).tolist() == nodes == [3, 4, 5, 6]
    for bench in (one_by_one, at_once):
        tree = bench.tree
        assert tree.parent[[1, *nodes]].tolist() == [0, 0, 3, 4, 5]
        assert tree.end[nodes].tolist() == [2, 4, 6, 8]
        assert tree.num_children[[parent, *nodes]].tolist() == [2, 1, 1, 1, 0]
        tree.page[0, nodes] = [90, 91, 92, 93]
        assert bench.match([1, 2, 3, 4, 1, 2, 5, 6]).path == nodes
        assert bench.match([1, 2, 3, 4, 1, 8])[:3] == (5, nodes[:2], nodes[2])
        assert bench.match([1, 9, 7, 8])[:3] == (3, [1], 2)
        tree.pin(nodes[-1])
        tree.unpin(nodes[-1])
        assert bench.freed == [(0, 93), (0, 92), (0, 91), (0, 90)]
        assert sorted(tree.nodes()) == [1, 2]


@pytest.mark.parametrize("num_blocks", [1, 255, 256, 700])
def test_a_chain_takes_free_nodes_first_and_then_new_ones(num_blocks):
    """The tree has room for 256 nodes at first; a root and three nodes that went leave the numbers 1 to 3 free."""
    tree = Bench([full()]).tree
    root = tree.root(None)
    gone = tree.insert_chain(root, [bytes(8), bytes(8), bytes(8)]).tolist()
    tree.pin(root)
    tree.prune(gone[-1])
    blocks = [np.array([index, index], dtype=np.int32).tobytes() for index in range(num_blocks)]
    nodes = tree.insert_chain(root, blocks).tolist()
    assert sorted(nodes)[:3] == [1, 2, 3][:num_blocks]
    assert sorted([*nodes, *[1, 2, 3][num_blocks:]]) == list(range(1, max(num_blocks, 3) + 1))
    assert tree.parent[nodes].tolist() == [root, *nodes[:-1]]
    assert tree.end[nodes].tolist() == list(range(2, 2 * num_blocks + 1, 2))
