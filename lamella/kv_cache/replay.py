"""Windowed replay: resume where full-attention KV is cached but the windows before it are gone.

A sliding layer's output at position p depends on W - 1 positions before it, so after N such layers a token
depends on N (W - 1) tokens before it and, through the full-attention layers, on all tokens before it. But the KV of
those layers is cached and need only be read. So to go on at h it is enough to recompute the tokens from `start(h)` on,
writing only windowed KV. The first of these tokens see less than their windows, so what is computed for them is wrong.
After each layer fewer tokens are wrong, and from h on every layer is exact.

Where every layer is windowed, nothing need be cached for this. Of a long prompt only the end is computed at all: the
tokens that its last token depends on through all layers (`skip`).
"""

from __future__ import annotations

import sys

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec, ceil_div

# A replay writes sliding KV for all of its tokens, and most of it is not needed afterwards. It may take no more than
# this share of the arena; otherwise it would evict what is worth more.
MAX_REPLAY_SHARE = 1 / 8


class ReplayRule:
    """Where to begin a replay or a skipped prompt, for the model whose layers `layout` describes.

    is_possible: a replay can pay, because the model has both windowed and full-attention groups.
    can_skip: the beginning of a prompt can be skipped, because all groups are windowed.
    most_tokens: no replay computes more tokens. Unlimited until `BlockManager.limit_replays` sets it.
    """

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

        For that alone it could begin up to a block later. It begins early enough that each block which meets a window
        at `position` is exact as a whole, and can be kept.
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
            exact[group] = position  # a layer's KV is computed from its input, so it is exact where that is
            if spec.is_windowed and position:
                position = _first_exact_output(spec, position)
        return exact

    def plan(self, num_full_tokens: int, num_valid_tokens: int) -> int | None:
        """Where to begin a replay that goes on at `num_full_tokens`, up to where full-attention KV is cached.

        None: no replay. So it is where resuming at `num_valid_tokens`, without a replay, takes at most twice as many
        tokens, and where more than `most_tokens` would be replayed."""
        if not self.is_possible or num_full_tokens <= num_valid_tokens:
            return None
        start = self.start(num_full_tokens)
        num_replayed = num_full_tokens - start
        pays = start > num_valid_tokens and 2 * num_replayed < num_full_tokens - num_valid_tokens
        return start if pays and num_replayed <= self.most_tokens else None

    def skip(self, num_tokens: int, num_valid_tokens: int) -> int | None:
        """Where to begin a prompt of `num_tokens` tokens so that the windows at its end, with one block more, and all
        that follows are exact. None: skip nothing, where resuming at `num_valid_tokens` takes at most twice as many
        tokens or the model has full-attention layers."""
        if not self.can_skip:
            return None
        last_kept = (num_tokens - 1) // self._page_tokens * self._page_tokens - self._page_tokens
        start = self.start(max(0, last_kept))
        pays = start > num_valid_tokens and 2 * (num_tokens - start) < num_tokens - num_valid_tokens
        return start if pays else None


def _first_exact_output(spec: KVCacheSpec, first_exact_input: int) -> int:
    """The first position from which on every query of the layer sees its whole window or chunk, and exact keys only, if
    keys are exact from `first_exact_input` on and do not exist before."""
    reach = spec.reach_tokens
    assert reach is not None
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ceil_div(first_exact_input, reach) * reach
    return first_exact_input + reach - 1
