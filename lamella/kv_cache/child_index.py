"""Which node of the prefix tree a block under a parent is, and the other way round: one dictionary look-up each.

A block is its int32 token ids as bytes. Only the dictionary hashes it, and it compares the keys as well; so two
different blocks are never taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise

from lamella.kv_cache.sibling_trie import NO_NODE, NOTHING_CLOSE, TOKEN_BYTES, Closest, SiblingTrie, num_common_bytes

__all__ = ["NO_NODE", "ChildIndex"]

_SEVERAL = -2


class ChildIndex:
    """Finds a node by its parent and its block, and the siblings that begin like a block.

    Most nodes have at most one child. So a trie of how the children begin is kept only under parents that have had
    several.

    is_source: called with a node, says whether copies may be taken of its block now. Whoever changes that calls
    `note_source`.
    """

    def __init__(self, is_source: Callable[[int], bool]) -> None:
        self._is_source = is_source
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._only_child: dict[int, int] = {}  # parent -> child, or _SEVERAL: see _tries
        self._tries: dict[int, SiblingTrie] = {}  # by parent
        self._trie_of: dict[int, SiblingTrie] = {}  # by child

    def __contains__(self, node: int) -> bool:
        return node in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def child(self, parent: int, tokens: bytes) -> int:
        """The node for a block under `parent`, or NO_NODE."""
        return self._nodes.get((parent, tokens), NO_NODE)

    def tokens(self, node: int) -> bytes:
        """The node's block."""
        return self._keys[node][1]

    def add(self, parent: int, tokens: bytes, node: int) -> None:
        """Enter a new node for a block that `parent` has no child for."""
        self._nodes[parent, tokens] = node
        self._keys[node] = parent, tokens
        only = self._only_child.setdefault(parent, node)
        if only == node:
            return
        if only != _SEVERAL:
            self._only_child[parent] = _SEVERAL
            self._tries[parent] = SiblingTrie()
            self._file(self._tries[parent], only)
        self._file(self._tries[parent], node)

    def add_chain(self, parent: int, blocks: Sequence[bytes], nodes: Sequence[int]) -> None:
        """`add` each block under the one before, in a fraction of the time. The nodes are new, and `parent` has no
        child for the first block."""
        self.add(parent, blocks[0], nodes[0])
        keys = list(zip(nodes[:-1], blocks[1:], strict=True))
        self._nodes.update(zip(keys, nodes[1:], strict=True))
        self._keys.update(zip(nodes[1:], keys, strict=True))
        self._only_child.update(pairwise(nodes))

    def remove(self, node: int) -> int:
        """Forget a node that has no children, and return its parent."""
        parent, tokens = self._keys.pop(node)
        del self._nodes[parent, tokens]
        trie = self._trie_of.pop(node, None)
        if trie is not None:
            trie.remove(node)
        if not trie:
            self._tries.pop(parent, None)
            del self._only_child[parent]
        return parent

    def is_noted_source(self, node: int) -> bool | None:
        """What `note_source` noted of the node. None: nothing is noted, because the node has had no siblings."""
        return self._trie_of[node].is_source(node) if node in self._trie_of else None

    def note_source(self, node: int) -> None:
        """Whether copies may be taken of the node's block may have changed."""
        trie = self._trie_of.get(node)
        if trie is not None:
            trie.set_source(node, self._is_source(node))

    def note_sources(self, nodes: Set[int]) -> None:
        """`note_source` each node."""
        for node in self._trie_of.keys() & nodes:
            self.note_source(node)

    def closest(self, parent: int, block: bytes, most_tokens: int) -> Closest:
        """Which children of `parent` have most in common with `block`. Of a copy no more than `most_tokens` tokens are
        of use."""
        only = self._only_child.get(parent, NO_NODE)
        if only == NO_NODE:
            return NOTHING_CLOSE
        if only == _SEVERAL:
            return self._tries[parent].closest(block, most_tokens)
        common = num_common_bytes(self.tokens(only), block) // TOKEN_BYTES
        usable = min(common, most_tokens)
        return Closest(common, only, usable) if usable > 0 and self._is_source(only) else Closest(common, NO_NODE, 0)

    def beginnings(self, parent: int, block: bytes) -> list[int]:
        """The children of `parent` whose blocks are shorter than `block` and its beginning, oldest first."""
        only = self._only_child.get(parent, NO_NODE)
        if only == _SEVERAL:
            return self._tries[parent].beginnings(block)
        is_one = only != NO_NODE and len(self.tokens(only)) < len(block) and block.startswith(self.tokens(only))
        return [only] if is_one else []

    def _file(self, trie: SiblingTrie, node: int) -> None:
        trie.add(node, self.tokens(node))
        self._trie_of[node] = trie
        self.note_source(node)
