"""What one layer keeps in the KV cache, and every rule that follows from it.

All questions about the lifetime of KV are answered here and nowhere else. Sizing, admission, sliding,
prefix matching and the attention metadata call these methods, so they cannot disagree.

A query at position q sees the keys [first_visible(q), q]. "Resume at n" means to compute the
token at position n next, so `first_needed(n) == first_visible(n)`: what a resume needs live is
[first_needed(n), n), and everything below may be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamella.errors import ConfigError


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """KV of one layer. Layers with equal specs form a group.

    num_kv_heads: heads of K and V; k_dim, v_dim: elements per head; itemsize_bytes: bytes per element.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    itemsize_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "k_dim", "v_dim", "itemsize_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be a positive integer")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer of this spec."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) * self.itemsize_bytes

    @property
    def is_windowed(self) -> bool:
        """Whether KV may be dropped before the request ends."""
        raise TypeError(
            "KVCacheSpec is abstract: use FullAttentionSpec, SlidingWindowSpec or ChunkedLocalAttentionSpec"
        )

    @property
    def reach_tokens(self) -> int | None:
        """Most keys a query can see, itself included; None: no limit."""
        raise TypeError("KVCacheSpec is abstract")

    def first_visible(self, position: int) -> int:
        """First key position that a query at `position` sees."""
        raise TypeError("KVCacheSpec is abstract")

    def first_visible_each(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """`first_visible` of every position (int64 [n] -> int64 [n])."""
        raise TypeError("KVCacheSpec is abstract")

    def first_needed(self, num_computed_tokens: int) -> int:
        """First position that must be live to compute the token at `num_computed_tokens`."""
        return self.first_visible(num_computed_tokens)

    def max_pages(
        self,
        *,
        page_tokens: int,
        max_model_len: int,
        chunk_tokens: int,
        interval_tokens: int,
        num_blocks_more: int = 1,
        num_draft_tokens: int = 0,
    ) -> int:
        """Most pages one request can hold at once, exactly.

        page_tokens: tokens per page. max_model_len: longest request, in tokens.
        chunk_tokens: most prompt tokens computed in one step.
        interval_tokens: how many tokens leave the window before a slide during decode.
        num_blocks_more: 1 where one block below the window is held as well (see RetentionPolicy), else 0.
        num_draft_tokens: most draft tokens that a step verifies behind a request's last token.
        """
        whole = ceil_div(max_model_len, page_tokens)
        return min(
            whole,
            max(
                self.max_decode_pages(
                    page_tokens=page_tokens,
                    interval_tokens=interval_tokens,
                    max_model_len=max_model_len,
                    num_blocks_more=num_blocks_more,
                    num_draft_tokens=num_draft_tokens,
                ),
                self.max_prefill_pages(
                    page_tokens=page_tokens,
                    chunk_tokens=chunk_tokens,
                    max_model_len=max_model_len,
                    num_blocks_more=num_blocks_more,
                ),
            ),
        )

    def max_decode_pages(
        self,
        *,
        page_tokens: int,
        interval_tokens: int,
        max_model_len: int,
        num_blocks_more: int = 1,
        num_draft_tokens: int = 0,
    ) -> int:
        """Most pages held while decoding, one token a step and up to `num_draft_tokens` drafts behind it.

        The kept range starts at a page boundary that lags behind `first_needed` by less than
        max(interval, page) tokens, and ends at the new token or the last draft. So it has at most
        reach - 1 + max(interval, page) + drafts tokens. Pages of drafts that were rejected are counted: they stay for
        the tokens that come in their place, and a row takes more only after it has slid by what was accepted.
        With `num_blocks_more`, the same rule is applied to the position one page earlier, which adds one page.
        """
        whole = ceil_div(max_model_len, page_tokens)
        if self.reach_tokens is None:
            return whole
        held_tokens = self.reach_tokens - 1 + max(interval_tokens, page_tokens) + num_draft_tokens
        return min(whole, ceil_div(held_tokens, page_tokens) + num_blocks_more)

    def max_prefill_pages(
        self, *, page_tokens: int, chunk_tokens: int, max_model_len: int, num_blocks_more: int = 1
    ) -> int:
        """Most pages held while a chunk of `chunk_tokens` is computed.

        The window slides before each chunk. So the kept range starts less than a page before the first key that
        the chunk's first query sees, and has at most reach - 1 + chunk + page - 1 tokens.

        With `num_blocks_more`, it starts one page before the window at the *end* of the last whole block before the
        chunk. That end may lie up to a page less one token before the chunk.
        """
        whole = ceil_div(max_model_len, page_tokens)
        if self.reach_tokens is None:
            return whole
        if not num_blocks_more:
            return min(whole, ceil_div(self.reach_tokens - 1 + chunk_tokens + page_tokens - 1, page_tokens))
        num_window_pages = ceil_div(self.reach_tokens - 1, page_tokens)
        return min(whole, num_blocks_more + num_window_pages + ceil_div(chunk_tokens + page_tokens - 1, page_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """A query sees every earlier key: k <= q. KV lives as long as the request."""

    @property
    def is_windowed(self) -> bool:
        return False

    @property
    def reach_tokens(self) -> int | None:
        return None

    def first_visible(self, position: int) -> int:
        return 0

    def first_visible_each(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """A query sees the last `window_tokens` keys, itself included: 0 <= q - k < W."""

    window_tokens: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not isinstance(self.window_tokens, int) or self.window_tokens < 1:
            raise ConfigError(
                f"window_tokens={self.window_tokens!r}: must be a positive integer; it counts the query itself"
            )

    @property
    def is_windowed(self) -> bool:
        return True

    @property
    def reach_tokens(self) -> int | None:
        return self.window_tokens

    def first_visible(self, position: int) -> int:
        return max(0, position - self.window_tokens + 1)

    def first_visible_each(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, positions - self.window_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A query sees the keys of its own chunk: floor(k / C) == floor(q / C) and k <= q (Llama 4)."""

    attention_chunk_tokens: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not isinstance(self.attention_chunk_tokens, int) or self.attention_chunk_tokens < 1:
            raise ConfigError(f"attention_chunk_tokens={self.attention_chunk_tokens!r}: must be a positive integer")

    @property
    def is_windowed(self) -> bool:
        return True

    @property
    def reach_tokens(self) -> int | None:
        return self.attention_chunk_tokens

    def first_visible(self, position: int) -> int:
        return position // self.attention_chunk_tokens * self.attention_chunk_tokens

    def first_visible_each(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions // self.attention_chunk_tokens * self.attention_chunk_tokens
