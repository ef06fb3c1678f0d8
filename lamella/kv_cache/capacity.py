"""How many requests of one length a KV memory holds at once, from each spec's own bounds."""

from __future__ import annotations

import bisect

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.sizing import request_pages
from lamella.kv_cache.spec import ceil_div


def batch_pages(
    layout: KVLayout,
    *,
    num_requests: int,
    context_tokens: int,
    chunk_tokens: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    """Most pages of each group that `num_requests` requests of up to `context_tokens` tokens hold at once.

    One of them computes a chunk of up to `chunk_tokens` and the others decode, because a step computes one chunk's
    worth of prompt tokens, and when a prompt is done its window slides before the next chunk takes pages.
    num_blocks_more, num_draft_tokens: see KVCacheSpec.max_pages.
    """
    busiest = request_pages(
        layout,
        max_model_len=context_tokens,
        chunk_tokens=min(chunk_tokens, context_tokens),
        interval_tokens=interval_tokens,
        num_blocks_more=num_blocks_more,
        num_draft_tokens=num_draft_tokens,
    )
    decoding = decode_pages(
        layout,
        context_tokens=context_tokens,
        interval_tokens=interval_tokens,
        num_blocks_more=num_blocks_more,
        num_draft_tokens=num_draft_tokens,
    )
    return tuple((num_requests - 1) * each + most for each, most in zip(decoding, busiest, strict=True))


def decode_pages(
    layout: KVLayout,
    *,
    context_tokens: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    """Most pages of each group that one request holds while it decodes up to `context_tokens` tokens."""
    return tuple(
        group.spec.max_decode_pages(
            page_tokens=layout.page_tokens,
            interval_tokens=interval_tokens,
            max_model_len=context_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        for group in layout.groups
    )


def num_requests_that_fit(
    layout: KVLayout,
    num_slabs: int,
    *,
    context_tokens: int,
    chunk_tokens: int,
    interval_tokens: int,
    slab_quota: tuple[int, ...] | None = None,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> int:
    """Most requests of `context_tokens` tokens that run at once without preemption, none sharing a prefix.

    num_slabs: the arena's, null slab included. slab_quota: slabs of each group's own pool; None: one pool for all.
    """

    def fits(num_requests: int) -> bool:
        pages = batch_pages(
            layout,
            num_requests=num_requests,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            interval_tokens=interval_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        slabs = [ceil_div(count, group.pages_per_slab) for count, group in zip(pages, layout.groups, strict=True)]
        if slab_quota is not None:
            return all(count <= quota for count, quota in zip(slabs, slab_quota, strict=True))
        return sum(slabs) <= num_slabs - 1

    most_pages = max(group.pages_per_slab for group in layout.groups) * num_slabs
    return bisect.bisect_left(range(1, most_pages + 1), True, key=lambda count: not fits(count))
