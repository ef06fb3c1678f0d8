"""What the prefix tree has of a prompt, and the rule for where a prompt can resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.spec import KVCacheSpec, ceil_div


class PrefixMatch(NamedTuple):
    """What the tree has of a prompt.

    num_tokens: where the prompt is resumed; the tokens before need not be computed.
    path: the nodes of the whole blocks before that.
    tail_node: the node whose block is to be copied for the positions after those blocks; NO_NODE where the prompt is
    resumed at a block boundary.
    num_structural_tokens: the longest prefix whose blocks exist, tombstones included. Where it is longer than
    num_tokens, another prompt has had these tokens, and either it parted from this one there or its window is gone.
    whole_path: the nodes of the whole blocks of that prefix.
    num_replayed_tokens: how many tokens `path` covers beyond num_tokens. Their full-attention KV is cached; their
    windowed KV is to be computed again.
    num_skipped_tokens: how many of num_tokens are not cached, and still need not be computed, for no later token
    depends on them.
    skipped_blocks: keys of those blocks of skipped tokens that have no node yet; they follow the end of `path`.
    boundaries: positions in the prompt, ascending, where places to resume are to be kept because prompts will part
    there.
    """

    num_tokens: int
    path: list[int]
    tail_node: int
    num_structural_tokens: int
    whole_path: Sequence[int] = ()
    num_replayed_tokens: int = 0
    num_skipped_tokens: int = 0
    skipped_blocks: Sequence[bytes] = ()
    boundaries: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes on after whole cached blocks: nothing to copy, to replay or to skip."""
        return self.tail_node == NO_NODE and not (self.num_replayed_tokens or self.num_skipped_tokens)


def longest_resume(live: Sequence[tuple[KVCacheSpec, np.ndarray]], limit: int, page_tokens: int) -> int:
    """Largest h <= limit where a prompt can resume: in every windowed group each block that meets
    [first_needed(h), h) is live, and so is the block that h lies inside of. That block is copied for
    the request; if it were not live, a block with unwritten positions would enter the tree.

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
                # No position up to here that is inside or after the dead block will do, with one exception: at its
                # end a chunk of chunked-local attention may start, and there nothing before is needed.
                block = low + int(dead[-1])
                end = (block + 1) * page_tokens
                position = end if end < position else block * page_tokens
                is_live = False
    return position


NO_MATCH = PrefixMatch(0, [], NO_NODE, 0)
