"""The child index against a list of (parent, tokens, node) in the order of adding, for trees that grow and shrink."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kv_cache.child_index import NO_NODE, ChildIndex
from tests.helpers.calls import num_calls

ROOT = 0
BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def as_bytes(block):
    return np.array(block, dtype=np.int32).tobytes()


def num_common(block, other):
    pairs = list(zip(block, other, strict=False))
    return next((index for index, (one, two) in enumerate(pairs) if one != two), len(pairs))


class Model:
    """nodes: node -> (parent, block), oldest first. sources: nodes that may be copied from."""

    def __init__(self):
        self.sources: set[int] = set()
        self.index = ChildIndex(lambda node: node in self.sources)
        self.nodes: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.free = [1, 2, 3]
        self.largest = 3

    def new_node(self, is_source):
        node = self.free.pop() if self.free else self.largest + 1
        self.largest = max(self.largest, node)
        if is_source:
            self.sources.add(node)
        return node

    def has(self, parent, block):
        return (parent, block) in self.nodes.values()

    def add(self, parent, block, is_source):
        if not self.has(parent, block):
            node = self.new_node(is_source)
            self.index.add(parent, as_bytes(block), node)
            self.nodes[node] = parent, block

    def add_chain(self, parent, blocks, is_source):
        if not self.has(parent, blocks[0]):
            nodes = [self.new_node(is_source) for _ in blocks]
            self.index.add_chain(parent, [as_bytes(block) for block in blocks], nodes)
            self.nodes |= zip(nodes, zip([parent, *nodes[:-1]], blocks, strict=True), strict=True)

    def turn(self, node):
        """A source is one no more, or the other way round."""
        self.sources ^= {node}
        self.index.note_source(node)

    def remove(self, node):
        if not any(parent == node for parent, _ in self.nodes.values()):
            parent, _ = self.nodes.pop(node)
            assert self.index.remove(node) == parent
            self.sources.discard(node)
            self.free.append(node)  # numbers come again

    def closest(self, children, block, most):
        """By a look at each child."""
        usable = {node: min(num_common(block, child), most) for node, child in children.items() if node in self.sources}
        longest = max(usable.values(), default=0)
        structural = max((num_common(block, child) for child in children.values()), default=0)
        if longest <= 0:
            return structural, NO_NODE, 0
        return structural, next(node for node, number in usable.items() if number == longest), longest

    def check(self, blocks):
        assert sorted(self.index) == sorted(self.nodes)
        for parent in (ROOT, *self.nodes):
            children = {node: block for node, (above, block) in self.nodes.items() if above == parent}
            nodes = {block: node for node, block in children.items()}
            for block in (*blocks, *nodes):
                assert self.index.child(parent, as_bytes(block)) == nodes.get(block, NO_NODE)
                shorter = [
                    node for node, child in children.items() if child == block[: len(child)] and len(child) < len(block)
                ]
                assert self.index.beginnings(parent, as_bytes(block)) == shorter
                for most in (0, 1, 3, len(block)):
                    assert self.index.closest(parent, as_bytes(block), most) == self.closest(children, block, most)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_children_are_found_whole_and_by_how_they_begin(data):
    model = Model()
    probes = data.draw(st.lists(BLOCKS, min_size=1, max_size=4))
    for kind in data.draw(st.lists(st.sampled_from(["add", "add", "chain", "turn", "remove"]), max_size=20)):
        if kind in ("turn", "remove"):
            if model.nodes:
                getattr(model, kind)(data.draw(st.sampled_from(sorted(model.nodes))))
        else:
            parent = data.draw(st.sampled_from([ROOT, ROOT, *sorted(model.nodes)]))
            is_source = data.draw(st.booleans())
            if kind == "add":
                model.add(parent, data.draw(BLOCKS), is_source)
            else:
                model.add_chain(parent, data.draw(st.lists(BLOCKS, min_size=1, max_size=4)), is_source)
        model.check(probes)


def test_a_parent_that_had_several_leaves_nothing_to_the_next_node_of_its_number():
    index = ChildIndex(lambda node: True)
    for node, token in ((1, 7), (2, 8)):
        index.add(ROOT, as_bytes([token]), node)
    for node in (1, 2):
        assert index.remove(node) == ROOT
    index.add(5, as_bytes([3]), ROOT)
    index.add(ROOT, as_bytes([7]), 1)
    assert index.closest(ROOT, as_bytes([7, 9]), 2) == (1, 1, 1)
    assert index.child(5, as_bytes([3])) == ROOT


@pytest.mark.parametrize("num_shared", [1, 9, 15])
def test_costs_do_not_grow_with_the_number_of_siblings(num_shared):
    """Blocks of 16 tokens that begin alike. A few calls more are branches that more siblings make."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 5000, (4000, 16), dtype=np.int32)
    blocks[:, :num_shared] = 7
    blocks = np.unique(blocks, axis=0)
    costs = []
    for num_siblings in (100, min(3000, len(blocks) - 1)):
        sources = set(range(num_siblings + 1))
        index = ChildIndex(sources.__contains__)
        for node in range(num_siblings):
            index.add(ROOT - 1, blocks[node].tobytes(), node)
        probe = blocks[num_siblings].tobytes()

        def use(index=index, sources=sources, node=num_siblings, probe=probe):
            assert index.closest(ROOT - 1, probe, 15).source in sources
            index.beginnings(ROOT - 1, probe)
            index.add(ROOT - 1, probe, node)
            sources.discard(0)  # the oldest
            index.note_source(0)
            index.remove(0)
            assert index.closest(ROOT - 1, probe, 16).source == node

        costs.append(num_calls(use))
    assert costs[1] < 1.5 * costs[0]
