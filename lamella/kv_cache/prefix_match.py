"""What the prefix tree has of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.spec import KVCacheSpec, ceil_div


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


def longest_resume(live: Sequence[tuple[KVCacheSpec, np.ndarray]], limit: int, page_tokens: int) -> int:
    """Largest h <= limit such that in every windowed group each block that meets
    [first_needed(h), h) is live, and so is the block that h lies inside of: who resumes there takes
    a copy of it, and a block with unwritten positions must never enter the tree.

    live: of each windowed group, which of the prefix's blocks have its page (bool [num_blocks]).
    """
    position = limit
    is_live = False
    while position > 0 and not is_live:
        is_live = True
        for spec, alive in live:
            first = min(spec.first_needed(position), position // page_tokens * page_tokens)
            low, high = first // page_tokens, ceil_div(position, page_tokens)
            dead = np.flatnonzero(~alive[low:high])
            if len(dead):
                # No position inside or after the dead block will do, its end excepted: there a
                # chunk of chunked-local attention may start, which needs nothing.
                block = low + int(dead[-1])
                end = (block + 1) * page_tokens
                position = end if end < position else block * page_tokens
                is_live = False
    return position


NO_MATCH = PrefixMatch(0, [], NO_NODE, 0)
