"""Which node of the prefix tree a block under a parent is, and the other way round: one dictionary look-up each.

A block is its int32 token ids as bytes. Nothing is hashed but by the dictionary, which compares: no two blocks collide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

NO_NODE = -1
_SEVERAL = -2
_TOKEN_BYTES = 4


class ChildIndex:
    """Most nodes have one child at most, so only parents that have had several keep an index by first token."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._only_child: dict[int, int] = {}  # parent -> child, or _SEVERAL: see _by_first_token
        self._by_first_token: dict[tuple[int, bytes], dict[int, None]] = {}

    def __contains__(self, node: int) -> bool:
        return node in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def child(self, parent: int, tokens: bytes) -> int:
        """The node for a block under `parent`, or NO_NODE."""
        return self._nodes.get((parent, tokens), NO_NODE)

    def tokens(self, node: int) -> bytes:
        return self._keys[node][1]

    def add(self, parent: int, tokens: bytes, node: int) -> None:
        self._nodes[parent, tokens] = node
        self._keys[node] = parent, tokens
        only = self._only_child.setdefault(parent, node)
        if only == node:
            return
        if only != _SEVERAL:
            self._only_child[parent] = _SEVERAL
            self._list(only)
        self._list(node)

    def add_chain(self, parent: int, blocks: Sequence[bytes], nodes: Sequence[int]) -> None:
        """Like `add` of each block below the one before, in a fraction of the time. The nodes are new, and so is the
        first block under `parent`."""
        self.add(parent, blocks[0], nodes[0])
        keys = list(zip(nodes[:-1], blocks[1:], strict=True))
        self._nodes.update(zip(keys, nodes[1:], strict=True))
        self._keys.update(zip(nodes[1:], keys, strict=True))
        self._only_child.update(pairwise(nodes))

    def remove(self, node: int) -> int:
        """Forget a node without children; its parent."""
        parent, tokens = self._keys.pop(node)
        del self._nodes[parent, tokens]
        self._only_child.pop(node, None)
        if self._only_child[parent] == node:
            del self._only_child[parent]
            return parent
        siblings = self._by_first_token[parent, tokens[:_TOKEN_BYTES]]
        del siblings[node]
        if not siblings:
            del self._by_first_token[parent, tokens[:_TOKEN_BYTES]]
        return parent

    def parting_children(self, parent: int, block: bytes) -> Iterator[tuple[int, int]]:
        """The children of `parent` that begin like `block`: (node, number of equal first tokens)."""
        first_token = block[:_TOKEN_BYTES]
        only = self._only_child.get(parent, _SEVERAL)
        listed = self._by_first_token.get((parent, first_token), ()) if only == _SEVERAL else (only,)
        for node in listed:
            tokens = self.tokens(node)
            if tokens[:_TOKEN_BYTES] != first_token:
                continue
            length = min(len(tokens), len(block)) // _TOKEN_BYTES
            same = np.frombuffer(tokens, np.int32, length) == np.frombuffer(block, np.int32, length)
            yield node, length if same.all() else int(same.argmin())

    def _list(self, node: int) -> None:
        parent, tokens = self._keys[node]
        self._by_first_token.setdefault((parent, tokens[:_TOKEN_BYTES]), {})[node] = None
