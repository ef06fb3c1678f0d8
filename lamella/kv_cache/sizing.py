"""How much KV memory a request needs, and what fits into how much.

One sum, from each spec's own bound, serves start-up checks, admission and reports.
"""

from __future__ import annotations

from typing import NamedTuple

from lamella.errors import CapacityError
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import ceil_div


class PoolSize(NamedTuple):
    num_slabs: int  # the null slab included
    chunk_tokens: int  # largest prefill chunk that one request of max_model_len can use
    max_model_len: int


def request_pages(layout: KVLayout, *, max_model_len: int, chunk_tokens: int, interval_tokens: int) -> tuple[int, ...]:
    """Most pages of each group that one request holds at once."""
    return tuple(
        group.spec.max_pages(
            page_tokens=layout.page_tokens,
            max_model_len=max_model_len,
            chunk_tokens=chunk_tokens,
            interval_tokens=interval_tokens,
        )
        for group in layout.groups
    )


def request_slabs(layout: KVLayout, *, max_model_len: int, chunk_tokens: int, interval_tokens: int) -> int:
    """Slabs that always suffice for one request alone.

    A window that slides through slabs of several pages can straddle one slab more than its pages fill.
    """
    pages = request_pages(
        layout, max_model_len=max_model_len, chunk_tokens=chunk_tokens, interval_tokens=interval_tokens
    )
    return sum(
        ceil_div(count, group.pages_per_slab) + (group.spec.is_windowed and group.pages_per_slab > 1)
        for count, group in zip(pages, layout.groups, strict=True)
    )


def size_pool(
    layout: KVLayout,
    *,
    memory_bytes: int,
    max_model_len: int | None,
    longest_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
) -> PoolSize:
    """Slabs for `memory_bytes`, checked against one request of `max_model_len` tokens.

    max_model_len None: the longest that fits, up to longest_model_len. A chunk too large for the memory
    is reduced (to a page at least).
    Raises CapacityError with the bytes that would do.
    """

    def slabs(length: int, chunk: int) -> int:
        return 1 + request_slabs(layout, max_model_len=length, chunk_tokens=chunk, interval_tokens=interval_tokens)

    num_slabs = memory_bytes // layout.slab_bytes
    smallest_chunk = min(layout.page_tokens, chunk_tokens)
    if max_model_len is None:
        max_model_len = _largest(longest_model_len, lambda length: slabs(length, smallest_chunk) <= num_slabs)
    if max_model_len < 1 or slabs(max_model_len, smallest_chunk) > num_slabs:
        length = max(1, max_model_len)
        need = slabs(length, smallest_chunk) * layout.slab_bytes
        fits = _largest(length, lambda shorter: slabs(shorter, smallest_chunk) <= num_slabs)
        raise CapacityError(
            f"kv_cache_memory_bytes={memory_bytes}: one request of max_model_len={length} tokens needs "
            f"{need} bytes ({need / 2**20:.1f} MiB); give that much"
            + (f', or set max_model_len to at most {fits} ("auto" finds it)' if fits else "")
        )
    fitting_length = max_model_len
    chunk = _largest(chunk_tokens, lambda smaller: slabs(fitting_length, smaller) <= num_slabs)
    return PoolSize(num_slabs, chunk, max_model_len)


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
