"""Whether a waiting request should start now: does it fit, and is it worth what it drives out of the cache?"""

from __future__ import annotations

import sys
from collections.abc import Collection

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.sizing import request_pages
from lamella.kv_cache.spec import ceil_div

# A replay writes sliding KV for its own length that nobody needs afterwards: no more than this share of the arena, or
# it would evict what is worth more. So does a chunk where there are no step pages.
MAX_REPLAY_SHARE = 1 / 8
MAX_CHUNK_SHARE = 1 / 8
# What a step costs whatever runs in it, in prompt tokens that could be computed meanwhile.
STEP_COST_TOKENS = 1100
# Where requests may be reordered, those that find little of their prompt leave so much of the arena to the growth of
# what runs: outputs, and next turns that would otherwise find themselves evicted.
GROWTH_SHARE = 0.14
# What is taken for the mean output length before requests have finished, and how many it counts for.
PRIOR_OUTPUT_TOKENS = 128
PRIOR_REQUESTS = 8


def sliding_tokens(manager: HybridBlockManager, num_bytes: float) -> int:
    """Tokens (whole blocks, one at least) whose sliding KV fits into `num_bytes`."""
    layout, windowed_groups = manager.layout, manager.tree.windowed_groups
    if not windowed_groups:
        return sys.maxsize
    block_bytes = sum(layout.groups[group].page_bytes for group in windowed_groups)
    return max(1, int(num_bytes) // block_bytes) * layout.page_tokens


def most_replay_tokens(manager: HybridBlockManager) -> int:
    """Most tokens that a replay may compute anew."""
    return sliding_tokens(manager, arena_bytes(manager) * MAX_REPLAY_SHARE)


def arena_bytes(manager: HybridBlockManager) -> int:
    return (manager.arena.num_slabs - 1) * manager.layout.slab_bytes


class Admission:
    """leaves_growth: see GROWTH_SHARE."""

    def __init__(self, manager: HybridBlockManager, rows: RequestRows, *, leaves_growth: bool = False) -> None:
        self._manager = manager
        self._growth_share = GROWTH_SHARE if leaves_growth else 0.0
        self._rows = rows
        self._num_finished = PRIOR_REQUESTS
        self._num_output_tokens = PRIOR_REQUESTS * PRIOR_OUTPUT_TOKENS

    def note_finished(self, request: Request) -> None:
        """A running request ended; how long its output was tells what to expect of others."""
        self._num_finished += 1
        self._num_output_tokens += len(request.token_ids) - request.num_prompt_tokens

    def prefill_tokens(self) -> int:
        """Most prompt tokens for the next step to compute: what step pages or idle memory hold of their sliding KV."""
        manager = self._manager
        if not manager.tree.windowed_groups:
            return sys.maxsize
        num_tokens = sliding_tokens(manager, manager.idle_bytes())
        if not manager.step_pages.num_tokens:
            return max(num_tokens, sliding_tokens(manager, arena_bytes(manager) * MAX_CHUNK_SHARE))
        return max(num_tokens, manager.step_pages.num_tokens)

    def has_room(self, request: Request, match: PrefixMatch, running: list[int], num_waiting: int) -> bool:
        """Whether the whole prompt fits beside what runs and what running prefills still need, and without
        evicting what other waiting requests expect, if that is worth more.

        Counts every group at the most that the request can hold with small chunks, so an admitted prompt is
        not preempted halfway for want of memory that could be foreseen. What a chunk holds of a window for
        the time of a step is no claim: the chunk is cut to what there is, and when it has run that comes back.
        """
        manager = self._manager
        groups = manager.layout.groups
        pages = [
            owned - sum(passing) + more
            for owned, more, *passing in zip(
                manager.num_owned,
                self._wanted_pages(request, match, running),
                *manager.num_passing.values(),
                strict=True,
            )
        ]
        quota = manager.arena.slab_quota
        if quota is not None:
            limits = [slabs * group.pages_per_slab for slabs, group in zip(quota, groups, strict=True)]
            fits = all(count <= limit for count, limit in zip(pages, limits, strict=True))
            has_spare_room = False
        else:
            num_bytes = sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))
            finds_little = 2 * match.num_tokens < len(request.token_ids)
            share = 1 - self._growth_share if finds_little else 1
            fits = num_bytes <= share * arena_bytes(manager)
            has_spare_room = num_bytes + self._expected_bytes_of_others(match) <= arena_bytes(manager)
        return fits and (has_spare_room or not self._should_wait(len(running), num_waiting))

    def finds_more_later(self, request: Request, match: PrefixMatch, rows: Collection[int]) -> bool:
        """Whether the request would find at least a block more of its prompt once what these rows compute is in
        the cache; or what it finds is pending."""
        manager, known, tokens = self._manager, self._rows, request.token_ids
        if not manager.enable_prefix_caching:
            return False
        if not manager.tree.pending.isdisjoint(match.path):
            return True
        length = match.num_tokens + manager.page_tokens
        if length > len(tokens):
            return False
        candidates = np.fromiter(rows, np.int64, len(rows))
        is_alike = known.tokens[candidates, length - 1] == tokens[length - 1]  # few are, and only those are compared
        is_alike &= known.num_tokens[candidates] >= length
        return any(
            known.request(row).salt == request.salt and np.array_equal(known.tokens[row, :length], tokens[:length])
            for row in candidates[is_alike].tolist()
        )

    def _wanted_pages(self, request: Request, match: PrefixMatch, running: list[int]) -> list[int]:
        """Pages per group that the request, and prefills that run, have yet to take."""
        manager, rows = self._manager, self._rows
        page_tokens = manager.page_tokens
        wanted = list(
            request_pages(
                manager.layout,
                max_model_len=len(request.token_ids) + 1,
                chunk_tokens=page_tokens,
                interval_tokens=manager.interval_tokens,
                num_blocks_more=0,  # what requests leave for their ends goes when memory is wanted
            )
        )
        prefills = [row for row in running if rows.num_tokens[row] - rows.num_computed[row] > 1]
        for group in manager.tree.full_groups:
            for row in prefills:
                whole = ceil_div(int(rows.num_tokens[row]) + 1, page_tokens)
                wanted[group] += whole - int(manager.num_blocks[row])
            if match.path:  # pages that others hold already cost nothing
                wanted[group] -= int((manager.tree.refs[group, match.path] > 0).sum())
        return wanted

    def _expected_bytes_of_others(self, match: PrefixMatch) -> int:
        expected = self._manager.tree.expected
        own = match.tail_node if match.tail_node in expected else match.path[-1] if match.path else -1
        return expected.num_bytes - expected.num_bytes_at(own)

    def _should_wait(self, num_running: int, num_waiting: int) -> bool:
        """Whether one running request more is worth less than the prefixes that it would evict.

        Let r requests run and q wait, w of which find their prefix of V tokens. A slot less costs a share
        1/r^2 of an output's steps; it keeps one prefix more for q waiting requests, of which the q - w that
        have none now would come to find theirs in turn: a share (q - w)/q^2 of V tokens. At few running or
        many waiting requests prefixes are lost before their turn comes, and nothing is held back.
        """
        expected = self._manager.tree.expected
        if not len(expected):
            return False
        num_output_tokens = self._num_output_tokens / self._num_finished
        num_lost_tokens = expected.num_tokens / len(expected)
        num_missing = max(1, num_waiting - expected.num_requests)
        gain = num_lost_tokens * num_missing * num_running**2
        return gain > STEP_COST_TOKENS * num_output_tokens * num_waiting**2
