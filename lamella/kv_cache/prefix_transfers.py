"""Prefixes that leave the cache, and that come in from elsewhere.

What comes in takes pages of the arena like a request does; the caller fills them; then they enter the prefix tree:

    free in the arena ──take──▶ in hand, written by the caller ──enter──▶ in the tree, held by a resume point
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lamella.errors import CapacityError, RequestError
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.prefix_tree import PrefixTree, Salt
from lamella.kv_cache.row_commits import block_key
from lamella.kv_cache.spec import ceil_div


class PrefixPages(NamedTuple):
    """Pages of one group that hold the KV of a prefix. first_block: the block of the first of them; pages: int64 [n],
    of that block and those that follow, up to the one that the prefix ends in."""

    first_block: int
    pages: np.ndarray


WritePages = Callable[[Sequence[PageMoves], Sequence[PrefixPages]], None]


class PrefixTransfers:
    """`give` and `take` prefixes of the tree. Both need a tree without pending nodes on their way."""

    def __init__(self, layout: KVLayout, tree: PrefixTree, supply: PageSupply) -> None:
        self._layout, self._tree, self._supply = layout, tree, supply
        self._page_tokens = layout.page_tokens

    def give(self, token_ids: np.ndarray, salt: Salt) -> list[PrefixPages]:
        """See BlockManager.export_prefix."""
        tree, length = self._tree, len(token_ids)
        match = tree.match(token_ids, salt, length)
        path = match.path if match.tail_node == NO_NODE else [*match.path, match.tail_node]
        if match.num_tokens < length or not tree.pending.isdisjoint(path):
            raise RequestError(
                f"of the prefix of {length} tokens {min(match.num_tokens, length - 1)} are in the cache, with what "
                "sliding layers see at its end: run a request with this prompt first"
            )
        found = []
        for group, spec in enumerate(tree.specs):
            first = 0
            pages = np.array([tree.page_at[group][node] for node in path], dtype=np.int64)
            if spec.is_windowed:
                first = spec.first_needed(max(0, length - self._page_tokens)) // self._page_tokens
                first += int((pages[first:] == NULL_PAGE).sum())  # a block more than is needed may be gone
            found.append(PrefixPages(first, pages[first:]))
        return found

    def first_blocks(self, num_tokens: int, first_tokens: Sequence[int]) -> list[int]:
        """Per group, the first block to take of a prefix of `num_tokens` tokens that brings KV from `first_tokens` on:
        all tokens of the block are brought. Raises RequestError where a block is missing that is needed."""
        blocks = []
        for group, (spec, first_token) in enumerate(zip(self._tree.specs, first_tokens, strict=True)):
            block, needed = ceil_div(first_token, self._page_tokens), spec.first_needed(num_tokens) // self._page_tokens
            if block > needed and needed * self._page_tokens < num_tokens:
                raise RequestError(
                    f"the prefix of {num_tokens} tokens brings {self._layout.groups[group].name} KV from token "
                    f"{first_token} on, and with page_size={self._page_tokens} it is needed from token "
                    f"{needed * self._page_tokens} on: use the page_size that it was saved with"
                )
            # No more than one block below what is needed, like other places to resume.
            block = max(block, spec.first_needed(max(0, num_tokens - self._page_tokens)) // self._page_tokens)
            blocks.append(min(block, num_tokens // self._page_tokens))
        return blocks

    def take(self, token_ids: np.ndarray, salt: Salt, first_tokens: Sequence[int], write: WritePages) -> bool:
        """See BlockManager.import_prefix."""
        tree, supply, length = self._tree, self._supply, len(token_ids)
        assert not tree.pending, "between two steps nothing is pending"
        first_blocks = self.first_blocks(length, first_tokens)
        if tree.match(token_ids, salt, length).num_tokens == length:
            return False
        num_blocks = ceil_div(length, self._page_tokens)
        taken = supply.take_pages([num_blocks - first for first in first_blocks])
        if taken is None:
            need = sum(
                (num_blocks - first) * group.page_bytes
                for first, group in zip(first_blocks, self._layout.groups, strict=True)
            )
            raise CapacityError(
                f"the prefix of {length} tokens takes {need} of {supply.total_bytes} bytes of KV memory, and running "
                "requests and pinned prefixes leave less: wait for requests to end, unpin prefixes, or give more "
                "memory"
            )
        pages = [np.array(one, dtype=np.int64) for one in taken]
        try:
            write(supply.take_moves(), [PrefixPages(*one) for one in zip(first_blocks, pages, strict=True)])
        except BaseException:
            supply.give_pages_back(taken)
            raise
        self._enter(token_ids, salt, first_blocks, pages)
        return True

    def _enter(self, token_ids: np.ndarray, salt: Salt, first_blocks: Sequence[int], pages: list[np.ndarray]) -> None:
        """Give the tree the pages that it lacks, as a favoured resume point, and free the others."""
        tree, supply, page_tokens = self._tree, self._supply, self._page_tokens
        node, path = tree.root(salt), []
        given: list[tuple[int, int]] = []
        for block in range(ceil_div(len(token_ids), page_tokens)):
            key = block_key(token_ids[block * page_tokens : (block + 1) * page_tokens])
            child = tree.child(node, key)
            node = tree.insert(node, key) if child == NO_NODE else child
            path.append(node)
            for group, first in enumerate(first_blocks):
                if block < first:
                    continue
                page = int(pages[group][block - first])
                if tree.page_at[group][node] == NULL_PAGE:
                    tree.give_page(group, node, page)
                    supply.count_owned(group, 1)
                    given.append((group, node))
                else:
                    supply.arena.free(group, page)
        windows = [(group, node) for group in tree.windowed_groups for node in path[first_blocks[group] :]]
        tree.add_resume_point(path[-1], list(dict.fromkeys([*windows, *tree.resume_points.held(path[-1])])))
        tree.favour(path[-1])
        for group, node in reversed(given):
            supply.unlock(group, node)
