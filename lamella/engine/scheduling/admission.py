"""Whether a waiting request should start now: does it fit, and is it worth what it drives out of the cache?"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.prefix_match import PrefixMatch

# A chunk writes sliding KV for its whole length, most of which nobody needs after the step. Where no step pages take
# it, it may fill no more than this share of the arena, or it would evict what is worth more.
MAX_CHUNK_SHARE = 1 / 8
# The fixed cost of a step, whatever runs in it, as the number of prompt tokens that could be computed in that time.
STEP_COST_TOKENS = 1100
# Where requests may be reordered, one that finds less than half of its prompt in the cache starts only if this share of
# the arena stays free. What runs needs it to grow: for outputs, and for next turns, whose prefixes would otherwise be
# evicted.
GROWTH_SHARE = 0.14
# The mean output length that is assumed before requests have finished, and how many finished requests it counts as.
PRIOR_OUTPUT_TOKENS = 128
PRIOR_REQUESTS = 8


class Admission:
    """leaves_growth: whether requests that find little leave GROWTH_SHARE of the arena free."""

    def __init__(self, manager: BlockManager, rows: RequestRows, *, leaves_growth: bool = False) -> None:
        self._manager = manager
        self._growth_share = GROWTH_SHARE if leaves_growth else 0.0
        self._rows = rows
        self._num_finished = PRIOR_REQUESTS
        self._num_output_tokens = PRIOR_REQUESTS * PRIOR_OUTPUT_TOKENS

    def note_finished(self, request: Request) -> None:
        """Count a running request that has ended: the length of its output tells what to expect of others."""
        self._num_finished += 1
        self._num_output_tokens += len(request.token_ids) - request.num_prompt_tokens

    def prefill_tokens(self) -> int:
        """How many prompt tokens the next step may compute at most: as many as step pages or idle memory have room for
        the sliding KV of."""
        return self._manager.prefill_room(MAX_CHUNK_SHARE)

    def has_room(self, request: Request, match: PrefixMatch, running: list[int], num_waiting: int) -> bool:
        """Whether the whole prompt fits beside what runs and what running prefills still need. It must not evict
        prefixes that other waiting requests expect, where these are worth more.

        What counts is how much the request can hold when it is computed in small chunks. So an admitted prompt is not
        preempted halfway for want of memory that could be foreseen.
        """
        rows = self._rows
        growing = [
            (row, int(rows.num_tokens[row]) + 1) for row in running if rows.num_tokens[row] - rows.num_computed[row] > 1
        ]
        demand = self._manager.demand(len(request.token_ids) + 1, match, growing)
        if demand.fits_pools is not None:
            fits = demand.fits_pools
            has_spare_room = False
        else:
            finds_little = 2 * match.num_tokens < len(request.token_ids)
            share = 1 - self._growth_share if finds_little else 1
            fits = demand.num_bytes <= share * demand.total_bytes
            has_spare_room = demand.num_bytes + self._manager.expected(match).num_bytes <= demand.total_bytes
        return fits and (has_spare_room or not self._should_wait(len(running), num_waiting))

    def finds_more_later(self, request: Request, match: PrefixMatch, rows: Collection[int]) -> bool:
        """Whether the request would find at least a block more of its prompt once what these rows compute is in
        the cache."""
        manager, known, tokens = self._manager, self._rows, request.sought_token_ids
        if not manager.settings.enable_prefix_caching:
            return False
        length = match.num_tokens + manager.layout.page_tokens
        if length > len(tokens):
            return False
        candidates = np.fromiter(rows, np.int64, len(rows))
        is_alike = known.tokens[candidates, length - 1] == tokens[length - 1]  # only these few are compared in full
        is_alike &= known.num_tokens[candidates] >= length
        return any(
            known.request(row).salt == request.salt and np.array_equal(known.tokens[row, :length], tokens[:length])
            for row in candidates[is_alike].tolist()
        )

    def _should_wait(self, num_running: int, num_waiting: int) -> bool:
        """Whether running one more request is worth less than the prefixes that it would evict.

        Let r requests run and q wait, of which w find a prefix of V tokens in the cache. To run one request less costs
        a share 1/r^2 of the steps of an output. It keeps one more prefix for the q that wait, and the q - w that find
        none now would come to find theirs in turn: that saves a share (q - w)/q^2 of V tokens. Where few requests run
        or many wait, prefixes are lost before their turn comes, and nothing is held back.
        """
        expected = self._manager.expected()
        if not expected.num_places:
            return False
        num_output_tokens = self._num_output_tokens / self._num_finished
        num_lost_tokens = expected.num_tokens / expected.num_places
        num_missing = max(1, num_waiting - expected.num_requests)
        gain = num_lost_tokens * num_missing * num_running**2
        return gain > STEP_COST_TOKENS * num_output_tokens * num_waiting**2
