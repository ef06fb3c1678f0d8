"""What the prefix tree has of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamella.kv_cache.child_index import NO_NODE


class PrefixMatch(NamedTuple):
    """What the tree has of a prompt.

    num_tokens: the longest resume point; path: nodes of its whole blocks; tail_node: the node that holds
    the positions after them, to be copied (NO_NODE where the resume point is a block boundary).
    num_structural_tokens: the longest prefix whose blocks exist, tombstones included; where it is longer
    than num_tokens, another prompt has been here and diverged or its window is gone. whole_path: nodes of its whole
    blocks. With num_replayed_tokens, `path` is longer than num_tokens by so many tokens, whose full-attention KV is
    there and whose windowed KV is to be computed again. With num_skipped_tokens, so many of num_tokens are not cached
    but need not be computed; skipped_blocks: keys of their blocks that are in no node, below the end of `path`.
    """

    num_tokens: int
    path: list[int]
    tail_node: int
    num_structural_tokens: int
    whole_path: Sequence[int] = ()
    num_replayed_tokens: int = 0
    num_skipped_tokens: int = 0
    skipped_blocks: Sequence[bytes] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes on after whole cached blocks: nothing to copy, to replay or to skip."""
        return self.tail_node == NO_NODE and not (self.num_replayed_tokens or self.num_skipped_tokens)


NO_MATCH = PrefixMatch(0, [], NO_NODE, 0)
