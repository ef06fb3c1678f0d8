"""The children of a node by how their blocks begin, against a list in which each is compared token by token."""

from __future__ import annotations

import random

import pytest

from lamella.kv_cache.sibling_trie import NO_NODE, SiblingTrie, num_common_bytes


def block_of(tokens) -> bytes:
    return b"".join(int(token).to_bytes(4, "little") for token in tokens)


def num_common(one, other) -> int:
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count


class Listed:
    """What SiblingTrie is, in a list of (node, tokens), oldest first."""

    def __init__(self) -> None:
        self.children: list[tuple[int, tuple[int, ...]]] = []
        self.sources: set[int] = set()

    def closest(self, tokens, most_tokens):
        most = max((num_common(tokens, other) for _, other in self.children), default=0)
        best, source = 0, NO_NODE
        for node, other in self.children:
            usable = min(num_common(tokens, other), most_tokens)
            if node in self.sources and usable > best:
                best, source = usable, node
        return most, source, best

    def beginnings(self, tokens):
        return [node for node, other in self.children if len(other) < len(tokens) and other == tokens[: len(other)]]


@pytest.mark.parametrize("seed", range(20))
def test_it_answers_as_the_list_does(seed):
    """Few tokens, so that much is shared; 256 among them, whose bytes begin as those of 0 do."""
    draw = random.Random(seed)
    alphabet = [0, 256, 1, 70_000][: draw.randint(2, 4)]
    trie, listed = SiblingTrie(), Listed()

    def any_tokens():
        return tuple(draw.choice(alphabet) for _ in range(draw.randint(1, 5)))

    for node in range(120):
        tokens = any_tokens()
        if tokens not in [other for _, other in listed.children]:
            trie.add(node, block_of(tokens))
            listed.children.append((node, tokens))
        if listed.children and draw.random() < 0.5:
            chosen, is_source = draw.choice(listed.children)[0], draw.random() < 0.7
            trie.set_source(chosen, is_source)
            (listed.sources.add if is_source else listed.sources.discard)(chosen)
        if listed.children and draw.random() < 0.3:
            gone = listed.children.pop(draw.randrange(len(listed.children)))[0]
            trie.remove(gone)
            listed.sources.discard(gone)
        assert len(trie) == len(listed.children)
        assert all(trie.is_source(one) == (one in listed.sources) for one, _ in listed.children)
        for _ in range(4):
            asked, most_tokens = any_tokens(), draw.randint(0, 5)
            assert tuple(trie.closest(block_of(asked), most_tokens)) == listed.closest(asked, most_tokens)
            assert trie.beginnings(block_of(asked)) == listed.beginnings(asked)


def test_bytes_in_common_are_those_of_whole_tokens():
    assert num_common_bytes(block_of([1, 2, 3]), block_of([1, 2, 4])) == 8
    assert num_common_bytes(block_of([1, 256]), block_of([1, 0])) == 4, "the last byte in common is half a token's"
    assert num_common_bytes(block_of([1, 2]), block_of([1, 2, 3])) == 8
    assert num_common_bytes(b"", block_of([1])) == 0
