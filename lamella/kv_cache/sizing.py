"""How much KV memory a request needs, and what fits into how much.

One sum, from each spec's own bound, serves start-up checks, admission and reports.
"""

from __future__ import annotations

from typing import NamedTuple

from lamella.errors import CapacityError
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.step_pages import region_bytes, region_tokens

# Step pages take no more than this share of the memory.
MAX_STEP_PAGES_SHARE = 1 / 96


class PoolSize(NamedTuple):
    num_slabs: int  # the null slab included
    chunk_tokens: int  # largest prefill chunk that one request of max_model_len can use
    max_model_len: int
    step_pages_bytes: int = 0  # behind the slabs, see `step_pages`


def request_pages(
    layout: KVLayout,
    *,
    max_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    """Most pages of each group that one request holds at once. num_blocks_more, num_draft_tokens: see
    KVCacheSpec.max_pages; they mean the same in all functions below."""
    return tuple(
        group.spec.max_pages(
            page_tokens=layout.page_tokens,
            max_model_len=max_model_len,
            chunk_tokens=chunk_tokens,
            interval_tokens=interval_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        for group in layout.groups
    )


def decode_table_widths(
    layout: KVLayout,
    *,
    max_model_len: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    """Most blocks of each group that the block table of a decoding request covers, from the first that it holds to the
    one of its newest token. In a windowed group that is one more than `max_decode_pages`, because the slide may come a
    step late."""
    widths = []
    for group in layout.groups:
        most = group.spec.max_decode_pages(
            page_tokens=layout.page_tokens,
            max_model_len=max_model_len,
            interval_tokens=interval_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        widths.append(min(most + group.spec.is_windowed, ceil_div(max_model_len, layout.page_tokens)))
    return tuple(widths)


def table_line_widths(
    layout: KVLayout,
    *,
    max_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    """Most blocks of each group that the block table of any request covers. A windowed group has the most while one
    chunk is in flight, the next one is planned, and the slide comes a step late. A full group covers all blocks of a
    request."""
    most = request_pages(
        layout,
        max_model_len=max_model_len,
        chunk_tokens=2 * chunk_tokens,
        interval_tokens=interval_tokens,
        num_blocks_more=num_blocks_more,
        num_draft_tokens=num_draft_tokens,
    )
    whole = ceil_div(max_model_len, layout.page_tokens)
    return tuple(min(count + 1, whole) for count in most)


def request_slabs(
    layout: KVLayout,
    *,
    max_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    num_blocks_more: int = 1,
    num_draft_tokens: int = 0,
) -> int:
    """Number of slabs that always suffices for one request alone.

    Where slabs hold several pages, a sliding window can lie across one slab more than its pages fill.
    """
    pages = request_pages(
        layout,
        max_model_len=max_model_len,
        chunk_tokens=chunk_tokens,
        interval_tokens=interval_tokens,
        num_blocks_more=num_blocks_more,
        num_draft_tokens=num_draft_tokens,
    )
    return sum(
        ceil_div(count, group.pages_per_slab) + (group.spec.is_windowed and group.pages_per_slab > 1)
        for count, group in zip(pages, layout.groups, strict=True)
    )


def step_pages_bytes(layout: KVLayout, *, memory_bytes: int, chunk_tokens: int) -> int:
    """How many of `memory_bytes` are for step pages: what a step of `chunk_tokens` prompt tokens can use, but at most
    the share MAX_STEP_PAGES_SHARE."""
    most = int(memory_bytes * MAX_STEP_PAGES_SHARE)
    return region_bytes(layout, min(chunk_tokens, region_tokens(layout, most)))


def held_chunk_tokens(layout: KVLayout, *, chunk_tokens: int, step_pages_bytes: int, num_blocks_more: int = 1) -> int:
    """The chunk length to give `request_pages` for a request that computes chunks of `chunk_tokens`, so that it counts
    the most pages that the request then holds in windowed groups. Without enough step pages that is `chunk_tokens`
    itself; with them it may be less, because passing blocks take no pages of the arena.

    What takes pages with step pages: the window before the chunk and the window at its end, each counted from a block
    boundary and with one block more, and the tokens from there on. These are w + 2 blocks each, where
    w = ceil((reach - 1) / page). `request_pages` counts 1 + w blocks before a chunk. So for a chunk of
    reach tokens and two pages it counts all of these.

    Where requests hold no block more, the end of the chunk has one all the same. Then at most 2 (reach - 1) tokens and
    5 pages stay, and `request_pages` counts reach - 1 + chunk + page - 1 tokens.
    """
    if not 0 < chunk_tokens <= region_tokens(layout, step_pages_bytes):
        return chunk_tokens
    reach = max(group.spec.reach_tokens or 0 for group in layout.groups if group.spec.is_windowed)
    return min(chunk_tokens, reach + (2 if num_blocks_more else 4) * layout.page_tokens)


def size_pool(
    layout: KVLayout,
    *,
    memory_bytes: int,
    max_model_len: int | None,
    longest_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    with_step_pages: bool = True,
    num_blocks_more: int = 1,
    set_aside_bytes: int = 0,
    num_draft_tokens: int = 0,
) -> PoolSize:
    """Slabs and step pages for `memory_bytes`, checked against one request of `max_model_len` tokens.

    set_aside_bytes: in whole slabs, what of the memory that request cannot have, because prefixes are pinned there.

    max_model_len None: the longest that fits, up to longest_model_len. A chunk that is too large for the memory
    is reduced, to one page at the least. If that request would not fit beside step pages, there are none.
    Raises CapacityError, which says how many bytes would do, where that request does not fit at all.
    """

    def slabs(length: int, chunk: int) -> int:
        return 1 + request_slabs(
            layout,
            max_model_len=length,
            chunk_tokens=chunk,
            interval_tokens=interval_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )

    def held(chunk: int, region: int) -> int:
        return held_chunk_tokens(layout, chunk_tokens=chunk, step_pages_bytes=region, num_blocks_more=num_blocks_more)

    given_bytes, memory_bytes = memory_bytes, max(0, memory_bytes - set_aside_bytes)
    num_slabs = memory_bytes // layout.slab_bytes
    smallest_chunk = min(layout.page_tokens, chunk_tokens)
    if max_model_len is None:
        max_model_len = _largest(longest_model_len, lambda length: slabs(length, smallest_chunk) <= num_slabs)
    if max_model_len < 1 or slabs(max_model_len, smallest_chunk) > num_slabs:
        length = max(1, max_model_len)
        need = slabs(length, smallest_chunk) * layout.slab_bytes
        fits = _largest(length, lambda shorter: slabs(shorter, smallest_chunk) <= num_slabs)
        raise CapacityError(
            f"kv_cache_memory_bytes={given_bytes}: one request of max_model_len={length} tokens needs "
            f"{need} bytes ({need / 2**20:.1f} MiB)"
            + (f", and max_pinned_bytes sets {set_aside_bytes} aside for pinned prefixes" if set_aside_bytes else "")
            + "; give that much"
            + (f', or set max_model_len to at most {fits} ("auto" finds it)' if fits else "")
        )
    fitting_length = max_model_len
    region = step_pages_bytes(layout, memory_bytes=memory_bytes, chunk_tokens=chunk_tokens) if with_step_pages else 0
    slabs_beside = (memory_bytes - region) // layout.slab_bytes
    if slabs(max_model_len, smallest_chunk) <= slabs_beside:
        num_slabs = slabs_beside
    else:
        region = 0
    chunk = _largest(
        chunk_tokens,
        lambda smaller: slabs(fitting_length, held(smaller, region)) <= num_slabs,
    )
    return PoolSize(num_slabs + set_aside_bytes // layout.slab_bytes, chunk, max_model_len, region)


def _largest(upper: int, fits) -> int:  # type: ignore[no-untyped-def]
    """Largest n in [0, upper] for which the monotone predicate `fits` holds (0 if none)."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
