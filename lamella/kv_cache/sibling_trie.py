"""The children of one node by how their blocks begin: which has most in common with a block, whatever their number.

A trie of tokens without the places where nothing parts:

    "a b c", "a b d", "a b", "x"       (root) ─┬─ "a b" ─┬─ "a b c"
                                               │         ├─ "a b d"
                                               │         └─ "a b"
                                               └─ "x"

Who looks up a block follows its tokens at the branches without a look at those between, and compares once, with where
that ends: what lies elsewhere parted from the block at a branch on the way, or parts from it where this one does.

Some children are *sources*: a copy may be taken of them. Each branch knows the oldest source below it.
"""

from __future__ import annotations

from typing import NamedTuple

from sortedcontainers import SortedList

NO_NODE = -1
TOKEN_BYTES = 4


class Closest(NamedTuple):
    """num_common: most first tokens that any child has in common with the block. source: of those that have most of
    all sources, the oldest; NO_NODE where none has any. num_usable: how many it has, up to what was asked for."""

    num_common: int
    source: int
    num_usable: int


NOTHING_CLOSE = Closest(0, NO_NODE, 0)


def num_common_bytes(block: bytes, other: bytes) -> int:
    """Bytes of the first tokens that two blocks have in common."""
    length = min(len(block), len(other))
    block, other = block[:length], other[:length]
    if block == other:
        return length
    difference = int.from_bytes(block, "big") ^ int.from_bytes(other, "big")
    return (8 * length - difference.bit_length()) // (8 * TOKEN_BYTES) * TOKEN_BYTES


_Age = tuple[int, int]  # (when it was added, node)


class _Leaf:
    """A child. prefix: all of its block."""

    __slots__ = ("above", "age", "is_source", "prefix")

    def __init__(self, prefix: bytes, age: _Age, above: _Branch) -> None:
        self.prefix, self.age, self.above, self.is_source = prefix, age, above, False

    @property
    def oldest_source(self) -> _Age | None:
        return self.age if self.is_source else None


class _Branch:
    """following: what begins with `prefix`, by the token after it; under b"" the child whose block ends there.
    sources: the oldest source of each of those that have any, oldest first. above: None for the root."""

    __slots__ = ("above", "following", "prefix", "sources")

    def __init__(self, prefix: bytes, above: _Branch | None) -> None:
        self.prefix, self.above = prefix, above
        self.following: dict[bytes, _Branch | _Leaf] = {}
        self.sources = SortedList()

    @property
    def oldest_source(self) -> _Age | None:
        oldest: _Age | None = self.sources[0] if self.sources else None
        return oldest

    def key(self, block: bytes) -> bytes:
        """Where a block that begins with `prefix` is, or would be, in `following`."""
        return block[len(self.prefix) : len(self.prefix) + TOKEN_BYTES]


class SiblingTrie:
    """No two blocks are equal. Costs grow with the tokens of a block, not with the number of children."""

    def __init__(self) -> None:
        self._root = _Branch(b"", None)
        self._leaves: dict[int, _Leaf] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, node: int, block: bytes) -> None:
        """A child that is no source yet."""
        path, end = self._way_to(block)
        common = num_common_bytes(block, (end or path[-1]).prefix)
        above = next(branch for branch in reversed(path) if len(branch.prefix) <= common)
        leaf = self._leaves[node] = _Leaf(block, (self._num_added, node), above)
        self._num_added += 1
        key = above.key(block)
        below = above.following.get(key)
        if below is None:
            above.following[key] = leaf
            return
        between = above.following[key] = below.above = leaf.above = _Branch(block[:common], above)
        between.following = {between.key(below.prefix): below, between.key(block): leaf}
        if below.oldest_source is not None:
            between.sources.add(below.oldest_source)

    def remove(self, node: int) -> None:
        self.set_source(node, False)
        leaf = self._leaves.pop(node)
        branch, above = leaf.above, leaf.above.above
        del branch.following[branch.key(leaf.prefix)]
        if above is not None and len(branch.following) == 1:  # nothing parts here any more
            (below,) = branch.following.values()
            above.following[above.key(leaf.prefix)], below.above = below, above

    def is_source(self, node: int) -> bool:
        return self._leaves[node].is_source

    def set_source(self, node: int, is_source: bool) -> None:
        """Whether copies may be taken of the child from now on."""
        leaf = self._leaves[node]
        if leaf.is_source == is_source:
            return
        before = leaf.oldest_source
        leaf.is_source = is_source
        after = leaf.oldest_source
        branch = leaf.above
        while branch.above is not None:  # up to the root, whose sources need have nothing in common with a block
            was_oldest = branch.oldest_source
            if before is not None:
                branch.sources.remove(before)
            if after is not None:
                branch.sources.add(after)
            before, after = was_oldest, branch.oldest_source
            if before == after:
                return
            branch = branch.above

    def closest(self, block: bytes, most_tokens: int) -> Closest:
        """What has most in common with `block`, where more than `most_tokens` of it are of no use."""
        path, end = self._way_to(block)
        common = num_common_bytes(block, (end or path[-1]).prefix)
        most = min(common, TOKEN_BYTES * most_tokens)
        num_usable, oldest = 0, None
        steps: list[_Branch | _Leaf] = [*path, end] if end else [*path]
        for step in steps:
            length = min(len(step.prefix), most)
            if length > num_usable and step.oldest_source is not None:
                num_usable, oldest = length, step.oldest_source
        return Closest(common // TOKEN_BYTES, oldest[1] if oldest else NO_NODE, num_usable // TOKEN_BYTES)

    def beginnings(self, block: bytes) -> list[int]:
        """The children that `block` begins with and goes on after, oldest first."""
        path, end = self._way_to(block)
        common = num_common_bytes(block, (end or path[-1]).prefix)
        ending = [branch.following.get(b"") for branch in path] + [end]
        whole = [leaf for leaf in ending if isinstance(leaf, _Leaf) and len(leaf.prefix) <= common]
        return [node for _, node in sorted({leaf.age for leaf in whole if len(leaf.prefix) < len(block)})]

    def _way_to(self, block: bytes) -> tuple[list[_Branch], _Leaf | None]:
        """The root and the branches that each one's next token leads to; and the child that it leads to at last, if
        it does: the one whose block this is, where there is one."""
        step: _Branch | _Leaf | None = self._root
        path: list[_Branch] = []
        while isinstance(step, _Branch):
            path.append(step)
            step = step.following.get(step.key(block))
        return path, step
