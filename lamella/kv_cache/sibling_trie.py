"""The children of one node by how their blocks begin: finds the one that has most in common with a block.

A compressed trie of tokens: it has a branch only where blocks part.

    "a b c", "a b d", "a b", "x"       (root) ─┬─ "a b" ─┬─ "a b c"
                                               │         ├─ "a b d"
                                               │         └─ "a b"
                                               └─ "x"

A look-up goes down by the block's tokens at the branches, without comparing the tokens between branches. Only at the
end is the block compared, once, with what was found there. This is enough: every other child parts from the block at a
branch on the way, or at the same place as what was found.

Some children are *sources*: a copy may be taken of them. Each branch knows the oldest source below it.
"""

from __future__ import annotations

from typing import NamedTuple

from sortedcontainers import SortedList

NO_NODE = -1
TOKEN_BYTES = 4


class Closest(NamedTuple):
    """What a look-up of a block finds.

    num_common: the most first tokens that any child has in common with the block.
    source: the source that has most in common with it, the oldest of equals; NO_NODE where none has anything.
    num_usable: how many first tokens `source` has in common with the block, up to the limit that was given.
    """

    num_common: int
    source: int
    num_usable: int


NOTHING_CLOSE = Closest(0, NO_NODE, 0)


def num_common_bytes(block: bytes, other: bytes) -> int:
    """How many bytes the first tokens take that two blocks have in common."""
    length = min(len(block), len(other))
    block, other = block[:length], other[:length]
    if block == other:
        return length
    difference = int.from_bytes(block, "big") ^ int.from_bytes(other, "big")
    return (8 * length - difference.bit_length()) // (8 * TOKEN_BYTES) * TOKEN_BYTES


_Age = tuple[int, int]  # (when it was added, node)


class _Leaf:
    """A child. prefix: its whole block."""

    __slots__ = ("above", "age", "is_source", "prefix")

    def __init__(self, prefix: bytes, age: _Age, above: _Branch) -> None:
        self.prefix, self.age, self.above, self.is_source = prefix, age, above, False

    @property
    def oldest_source(self) -> _Age | None:
        return self.age if self.is_source else None


class _Branch:
    """A place where blocks part that all begin with `prefix`.

    following: the branch or leaf below for each token that comes next; under b"" the child whose block ends here.
    sources: the oldest source of each entry of `following` that has any, oldest first. above: None for the root.
    """

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
        """The key in `following` of a block that begins with `prefix`: its next token, or b"" where it ends."""
        return block[len(self.prefix) : len(self.prefix) + TOKEN_BYTES]


class SiblingTrie:
    """Children by their blocks, of which no two are equal. Costs grow with the tokens of a block, not with the number
    of children."""

    def __init__(self) -> None:
        self._root = _Branch(b"", None)
        self._leaves: dict[int, _Leaf] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, node: int, block: bytes) -> None:
        """Add a child, which is no source yet."""
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
        """Remove the child, and the branch above it if nothing parts there any more."""
        self.set_source(node, False)
        leaf = self._leaves.pop(node)
        branch, above = leaf.above, leaf.above.above
        del branch.following[branch.key(leaf.prefix)]
        if above is not None and len(branch.following) == 1:  # nothing parts here any more
            (below,) = branch.following.values()
            above.following[above.key(leaf.prefix)], below.above = below, above

    def is_source(self, node: int) -> bool:
        """Whether copies may be taken of the child, as `set_source` said last."""
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
        while branch.above is not None:  # the root keeps no sources: those below it may share no token
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
        """Which children have most in common with `block`. Of a copy no more than `most_tokens` tokens are of use."""
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
        """The children whose blocks are shorter than `block` and its beginning, oldest first."""
        path, end = self._way_to(block)
        common = num_common_bytes(block, (end or path[-1]).prefix)
        ending = [branch.following.get(b"") for branch in path] + [end]
        whole = [leaf for leaf in ending if isinstance(leaf, _Leaf) and len(leaf.prefix) <= common]
        return [node for _, node in sorted({leaf.age for leaf in whole if len(leaf.prefix) < len(block)})]

    def _way_to(self, block: bytes) -> tuple[list[_Branch], _Leaf | None]:
        """Follow the block from the root: the branches on the way, root included, and the leaf where the way ends, or
        None where no branch goes on. If a child has this very block, it is that leaf."""
        step: _Branch | _Leaf | None = self._root
        path: list[_Branch] = []
        while isinstance(step, _Branch):
            path.append(step)
            step = step.following.get(step.key(block))
        return path, step
