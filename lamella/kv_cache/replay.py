"""Windowed replay: resume where full-attention KV is cached but the windows before it are gone.

A sliding layer's output at position p depends on W - 1 positions before it, so after N such layers a token
depends on N (W - 1) tokens before it and, through the full-attention layers, on all of them; but those layers' KV
is cached and need only be read. So to go on at h it is enough to recompute the tokens from `start(h)` on, writing
only windowed KV. The first of them come out wrong, for they see less than their windows; layer by layer more come
out right, and from h on all are.

Where every layer is windowed, no KV need be cached for that: of a long prompt only the end is computed at all, as far
as its last token depends on it through all layers (`skip`).
"""

from __future__ import annotations

import sys

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec, ceil_div

# A replay writes sliding KV for its own length that nobody needs afterwards: no more than this share of the arena, or
# it would evict what is worth more.
MAX_REPLAY_SHARE = 1 / 8


class ReplayRule:
    """For a model whose layers `layout` describes. `is_possible`: it has both windowed and full-attention groups;
    `can_skip`: it has windowed ones only. `most_tokens`: no replay computes more; whoever knows sets it."""

    def __init__(self, layout: KVLayout) -> None:
        self.most_tokens = sys.maxsize
        self._page_tokens = layout.page_tokens
        group_of = [layout.layer_address(layer)[0] for layer in range(len(layout.owners))]
        self._layers = [(group, layout.groups[group].spec) for group in group_of]
        self._num_groups = len(layout.groups)
        kinds = {group.spec.is_windowed for group in layout.groups}
        self.is_possible = kinds == {True, False}
        self.can_skip = kinds == {True}

    def start(self, position: int) -> int:
        """Where to begin, at a block boundary, so that all layers are exact from `position` on.

        A block more than that needs, so that the windows at `position` are exact in whole blocks and can be kept.
        """
        first = position - (self._page_tokens - 1)
        for _, spec in reversed(self._layers):
            if spec.is_windowed and first > 0:
                first = spec.first_needed(first)
        return max(0, first) // self._page_tokens * self._page_tokens

    def exact_from(self, start: int) -> list[int]:
        """Per group, the first position whose KV is exact in all of its layers when the tokens from `start` on are
        computed and no windowed KV from before exists."""
        position = start
        exact = [0] * self._num_groups
        for group, spec in self._layers:
            exact[group] = position  # KV comes from the layer's input
            if spec.is_windowed and position:
                position = _first_exact_output(spec, position)
        return exact

    def plan(self, num_full_tokens: int, num_valid_tokens: int) -> int | None:
        """Where to begin to go on at `num_full_tokens`, or None where resuming at `num_valid_tokens` costs less
        than twice as much, or more than `most_tokens` would be replayed."""
        if not self.is_possible or num_full_tokens <= num_valid_tokens:
            return None
        start = self.start(num_full_tokens)
        num_replayed = num_full_tokens - start
        pays = start > num_valid_tokens and 2 * num_replayed < num_full_tokens - num_valid_tokens
        return start if pays and num_replayed <= self.most_tokens else None

    def skip(self, num_tokens: int, num_valid_tokens: int) -> int | None:
        """Where to begin a prompt of `num_tokens` so that the windows at its end, with a block more, and all that
        follows are exact; None where resuming at `num_valid_tokens` costs less than twice as much."""
        if not self.can_skip:
            return None
        last_kept = (num_tokens - 1) // self._page_tokens * self._page_tokens - self._page_tokens
        start = self.start(max(0, last_kept))
        pays = start > num_valid_tokens and 2 * (num_tokens - start) < num_tokens - num_valid_tokens
        return start if pays else None


def _first_exact_output(spec: KVCacheSpec, first_exact_input: int) -> int:
    """The first position from which on a layer's queries see exact keys only, and its own chunk or window whole."""
    reach = spec.reach_tokens
    assert reach is not None
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ceil_div(first_exact_input, reach) * reach
    return first_exact_input + reach - 1
