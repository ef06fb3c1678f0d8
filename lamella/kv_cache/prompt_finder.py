"""What need not be computed of a prompt, and what a waiting request counts on of that."""

from __future__ import annotations

import numpy as np

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.pinned_prefixes import PinnedPrefixes
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree, Salt
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.row_commits import block_key
from lamella.kv_cache.settings import CacheSettings


class PromptFinder:
    """Looks prompts up in the tree. Only `expect` changes it: it adds a resume point and an expectation of it."""

    def __init__(
        self, layout: KVLayout, settings: CacheSettings, replay: ReplayRule, tree: PrefixTree, pins: PinnedPrefixes
    ) -> None:
        self._layout, self._page_tokens = layout, layout.page_tokens
        self._replay, self._tree, self._pins = replay, tree, pins
        self._caches_prefixes, self._replays = settings.enable_prefix_caching, settings.windowed_replay
        self._keeps_ends = settings.retention.keeps_ends
        self._keeps_boundaries = self._caches_prefixes and (self._keeps_ends or not tree.windowed_groups)
        self._skips = settings.skips_prompts and not settings.retention.keeps_block_ends

    def match(self, token_ids: np.ndarray, salt: Salt, boundaries: tuple[int, ...] = ()) -> PrefixMatch:
        """See BlockManager.match."""
        match = self._find(token_ids, salt)
        if boundaries and self._keeps_boundaries:
            match = match._replace(boundaries=boundaries)
        if not self._skips:
            return match
        # What comes before a boundary is not skipped, as if the prompt ended there.
        num_tokens = next((one for one in match.boundaries if one > match.num_tokens), len(token_ids))
        start = self._replay.skip(num_tokens, match.num_tokens)
        if start is None:
            return match
        page_tokens = self._page_tokens
        path = list(match.whole_path[: start // page_tokens])
        known = len(path) * page_tokens
        skipped = [block_key(token_ids[block : block + page_tokens]) for block in range(known, start, page_tokens)]
        return match._replace(
            num_tokens=start,
            path=path,
            tail_node=NO_NODE,
            num_replayed_tokens=0,
            num_skipped_tokens=start - match.num_tokens,
            skipped_blocks=skipped if self._caches_prefixes else (),
        )

    def _find(self, token_ids: np.ndarray, salt: Salt) -> PrefixMatch:
        """What the cache has of this prompt, with a replay where that pays, and nothing skipped."""
        if not self._caches_prefixes:
            return NO_MATCH
        match = self._tree.match(token_ids, salt, len(token_ids) - 1)
        if self._pins.holds:
            match = self._pins.improve(match, token_ids, salt)
        if not self._replays:
            return match
        num_blocks = min(len(match.whole_path), (len(token_ids) - 1) // self._page_tokens)
        start = self._replay.plan(num_blocks * self._page_tokens, match.num_tokens)
        if start is None:
            return match
        return match._replace(
            num_tokens=start,
            path=list(match.whole_path[:num_blocks]),
            tail_node=NO_NODE,
            num_replayed_tokens=num_blocks * self._page_tokens - start,
        )

    def expect(self, token_ids: np.ndarray, salt: Salt, rank: int) -> Expectation | None:
        """See BlockManager.expect."""
        tree = self._tree
        if tree.windowed_groups and not self._keeps_ends:
            return None
        match = self._find(token_ids, salt)
        if not match.num_tokens:
            return None
        path = match.path if match.tail_node == NO_NODE else [*match.path, match.tail_node]
        if not tree.pending.isdisjoint(path):
            return None  # the step that will compute it may fail
        held = []
        num_bytes = 0
        for group, spec in enumerate(tree.specs):
            if spec.is_windowed and match.num_replayed_tokens:
                continue
            if spec.is_windowed:
                first = min(spec.first_needed(match.num_tokens) // self._page_tokens, len(match.path))
                held += [(group, node) for node in path[first:]]
            else:  # blocks that other prefixes or running requests share with it stay cached without it
                shared = np.flatnonzero((tree.num_children[path] > 1) | (tree.refs[group, path] > 0))
                first = int(shared[-1]) + 1 if len(shared) else 0
            num_bytes += (len(path) - first) * self._layout.groups[group].page_bytes
        held = list(dict.fromkeys([*held, *tree.resume_points.held(path[-1])]))
        tree.add_resume_point(path[-1], held)
        expectation = Expectation(path[-1], rank, match.num_tokens, num_bytes)
        tree.resume_points.expect(expectation)
        return expectation
