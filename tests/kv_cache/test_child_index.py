"""The child index against a list of (parent, tokens, node), for trees that grow and shrink."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.kv_cache.child_index import NO_NODE, ChildIndex

ROOT = 0
BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


def as_bytes(block):
    return np.array(block, dtype=np.int32).tobytes()


def num_common(block, other):
    pairs = list(zip(block, other, strict=False))
    return next((index for index, (one, two) in enumerate(pairs) if one != two), len(pairs))


class Model:
    """nodes: node -> (parent, block)."""

    def __init__(self):
        self.index = ChildIndex()
        self.nodes: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.free = [1, 2, 3]
        self.largest = 3

    def new_node(self):
        if self.free:
            return self.free.pop()
        self.largest += 1
        return self.largest

    def has(self, parent, block):
        return (parent, block) in self.nodes.values()

    def add(self, parent, block):
        if not self.has(parent, block):
            node = self.new_node()
            self.index.add(parent, as_bytes(block), node)
            self.nodes[node] = parent, block

    def add_chain(self, parent, blocks):
        if not self.has(parent, blocks[0]):
            nodes = [self.new_node() for _ in blocks]
            self.index.add_chain(parent, [as_bytes(block) for block in blocks], nodes)
            self.nodes |= zip(nodes, zip([parent, *nodes[:-1]], blocks, strict=True), strict=True)

    def remove(self, node):
        if not any(parent == node for parent, _ in self.nodes.values()):
            parent, _ = self.nodes.pop(node)
            assert self.index.remove(node) == parent
            self.free.append(node)  # numbers come again

    def check(self, blocks):
        assert sorted(self.index) == sorted(self.nodes)
        for parent in (ROOT, *self.nodes):
            children = {block: node for node, (above, block) in self.nodes.items() if above == parent}
            for block in (*blocks, *children):
                assert self.index.child(parent, as_bytes(block)) == children.get(block, NO_NODE)
                common = {node: num_common(child, block) for child, node in children.items()}
                expected = {node: number for node, number in common.items() if number}
                assert dict(self.index.parting_children(parent, as_bytes(block))) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_children_are_found_whole_and_by_how_they_begin(data):
    model = Model()
    probes = data.draw(st.lists(BLOCKS, min_size=1, max_size=4))
    for kind in data.draw(st.lists(st.sampled_from(["add", "add", "chain", "remove"]), max_size=14)):
        if kind == "remove":
            if model.nodes:
                model.remove(data.draw(st.sampled_from(sorted(model.nodes))))
        else:
            parent = data.draw(st.sampled_from([ROOT, *sorted(model.nodes)]))
            if kind == "add":
                model.add(parent, data.draw(BLOCKS))
            else:
                model.add_chain(parent, data.draw(st.lists(BLOCKS, min_size=1, max_size=4)))
        model.check(probes)


def test_a_parent_that_had_several_leaves_nothing_to_the_next_node_of_its_number():
    index = ChildIndex()
    for node, token in ((1, 7), (2, 8)):
        index.add(ROOT, as_bytes([token]), node)
    for node in (1, 2):
        assert index.remove(node) == ROOT
    index.add(5, as_bytes([3]), ROOT)
    index.add(ROOT, as_bytes([7]), 1)
    assert dict(index.parting_children(ROOT, as_bytes([7, 9]))) == {1: 1}
    assert index.child(5, as_bytes([3])) == ROOT
