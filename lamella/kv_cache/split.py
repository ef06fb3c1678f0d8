"""Fixed pools: the arena divided once, at start-up, between full and windowed groups (`kv_split="ratio"`).

With r = swa_full_tokens_ratio, a full group's pool holds N tokens and each windowed group's r * N:

    cell = F * L_full + r * S * L_swa        bytes that one token of full capacity takes
    N    = floor(bytes / cell)               F, S: bytes of one token in one layer

N and r * N are rounded down to pages, and a pool to whole slabs, since slabs are what the arena hands out. The null
slab and what a slab wastes are taken off first. Slabs left over by rounding are not allocated.
"""

from __future__ import annotations

import bisect
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lamella.argument_checks import shown
from lamella.errors import CapacityError, ConfigError
from lamella.kv_cache.capacity import batch_pages
from lamella.kv_cache.layout import KVGroup, KVLayout
from lamella.kv_cache.sizing import request_pages
from lamella.kv_cache.spec import ceil_div

DEFAULT_RATIO = 0.8
LEAST_RATIO, MOST_RATIO = 1e-6, 1e6


class SplitPools(NamedTuple):
    num_slabs: int  # the null slab included
    slab_quota: tuple[int, ...]  # slabs of each group's pool
    chunk_tokens: int  # largest prefill chunk that the windowed pools hold of one request, up to what was asked for
    interval_tokens: int  # largest eviction interval that they hold, up to what was asked for
    max_model_len: int
    rule: str  # how the pools were divided, in words


def group_token_bytes(group: KVGroup) -> int:
    """Bytes of one token in all layers of the group."""
    return len(group.layers) * group.spec.token_bytes


def is_splittable(layout: KVLayout) -> bool:
    """Whether there are both full and windowed groups, so that a ratio means something."""
    return len({group.spec.is_windowed for group in layout.groups}) == 2


def cell_bytes(layout: KVLayout, ratio: float) -> Fraction:
    """Bytes that one token of full capacity takes together with the windowed capacity that comes with it, as an exact
    fraction."""
    weighted = zip(_weights(layout, ratio), layout.groups, strict=True)
    return sum((weight * group_token_bytes(group) for weight, group in weighted), start=Fraction(0))


def split_tokens(layout: KVLayout, memory_bytes: int, ratio: float) -> tuple[int, ...]:
    """Tokens of each group's pool, in whole pages, before the pools are rounded to slabs. In a model with one kind of
    groups only, each gets the same number of tokens and `ratio` is ignored."""
    page_tokens = layout.page_tokens
    base = memory_bytes // cell_bytes(layout, ratio) // page_tokens * page_tokens
    return tuple(int(weight * base) // page_tokens * page_tokens for weight in _weights(layout, ratio))


def split_pools(
    layout: KVLayout,
    *,
    memory_bytes: int,
    ratio: float | None,
    max_model_len: int | None,
    longest_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    max_num_seqs: int,
    enable_prefix_caching: bool,
    num_blocks_more: int | None = None,
    num_draft_tokens: int = 0,
) -> SplitPools:
    """Pools of whole slabs for `memory_bytes`, checked against one request of `max_model_len` tokens.

    ratio None: DEFAULT_RATIO. Where prefix caching is off as well, only running requests can fill a windowed pool.
    So it gets no more than max_num_seqs requests hold while one of them computes a chunk (chunked prefill is always
    on), and full attention gets the rest. A ratio that is given is kept, whatever its value.
    max_model_len None: the longest that fits, up to longest_model_len.
    chunk_tokens, interval_tokens: reduced to what the windowed pools hold, to one page at the least.
    num_blocks_more, num_draft_tokens: see KVCacheSpec.max_pages; num_blocks_more None: 1 with prefix caching, else 0.
    Raises ConfigError when a ratio is given and there is nothing to divide. Raises CapacityError, which says what would
    do, when a windowed pool has no more tokens than window + page, or a pool is smaller than what one request needs
    with a chunk and an interval of one page.
    """
    if num_blocks_more is None:
        num_blocks_more = int(enable_prefix_caching)
    if ratio is not None:
        ratio = check_ratio(ratio)
        if not is_splittable(layout):
            raise ConfigError(
                f"swa_full_tokens_ratio={ratio}: the KV cache has "
                f"{'no full-attention' if layout.groups[0].spec.is_windowed else 'no windowed'} layers, so there is "
                "nothing to divide; leave the ratio out (disable_hybrid_kv_cache keeps every layer like a full one)"
            )
    page_tokens = layout.page_tokens
    smallest_chunk, smallest_interval = min(page_tokens, chunk_tokens), min(page_tokens, interval_tokens)

    def quota_of(num_slabs: int, of_ratio: float | None) -> tuple[int, ...]:
        if of_ratio is None and not enable_prefix_caching and is_splittable(layout):
            most_pages = batch_pages(
                layout,
                num_requests=max_num_seqs,
                context_tokens=max_model_len or longest_model_len,
                chunk_tokens=chunk_tokens,
                interval_tokens=interval_tokens,
                num_blocks_more=num_blocks_more,
                num_draft_tokens=num_draft_tokens,
            )
            return _capped_quota(layout, num_slabs, most_pages)
        return _ratio_quota(layout, num_slabs, DEFAULT_RATIO if of_ratio is None else of_ratio)

    def pages_for(length: int) -> tuple[int, ...]:
        return request_pages(
            layout,
            max_model_len=length,
            chunk_tokens=smallest_chunk,
            interval_tokens=smallest_interval,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )

    def suffices(quota: tuple[int, ...], length: int) -> bool:
        return _shortage(layout, quota, pages_for(length)) is None

    num_slabs = memory_bytes // layout.slab_bytes
    quota = quota_of(num_slabs, ratio)
    length = max_model_len
    if length is None:
        length = max(1, _largest(longest_model_len, lambda shorter: suffices(quota, shorter)))
    shortage = _shortage(layout, quota, pages_for(length))
    rule = _rule(layout, ratio, enable_prefix_caching)
    if shortage is not None:
        wanted = length
        least_bytes = layout.slab_bytes * _smallest(lambda count: suffices(quota_of(count, ratio), wanted))
        remedies = [f"{least_bytes} bytes ({least_bytes / 2**20:.1f} MiB) would do"]
        hundredths = [percent / 100 for percent in range(1, 101) if is_splittable(layout)]
        ratios = [other for other in hundredths if suffices(quota_of(num_slabs, other), wanted)]
        if ratios:
            remedies.append(f"or swa_full_tokens_ratio from {ratios[0]} to {ratios[-1]}")
        if shorter := _largest(length, lambda shorter: suffices(quota, shorter)):
            remedies.append(f"or max_model_len of at most {shorter}")
        raise CapacityError(
            f'kv_split="ratio", {rule}, kv_cache_memory_bytes={memory_bytes}: {shortage}; '
            f'{", ".join(remedies)}, or kv_split="elastic"'
        )
    pool_pages = _pool_pages(layout, quota)
    return SplitPools(
        num_slabs=1 + sum(quota),
        slab_quota=quota,
        chunk_tokens=_largest(
            chunk_tokens, lambda chunk: _chunk_fits(layout, pool_pages, chunk, length, num_blocks_more)
        ),
        interval_tokens=_largest(
            interval_tokens,
            lambda lag: _interval_fits(layout, pool_pages, lag, length, num_blocks_more, num_draft_tokens),
        ),
        max_model_len=length,
        rule=rule,
    )


def check_ratio(ratio: float) -> float:
    """The ratio as Python's own number; ConfigError unless it is a positive one."""
    if (
        isinstance(ratio, (bool, np.bool_))
        or not isinstance(ratio, numbers.Real)
        or not LEAST_RATIO <= ratio <= MOST_RATIO
    ):
        raise ConfigError(
            f"swa_full_tokens_ratio={shown(ratio)}: must be a positive number from {LEAST_RATIO:g} to "
            f"{MOST_RATIO:g}, the windowed tokens kept per full token; {DEFAULT_RATIO} is the default"
        )
    return int(ratio) if isinstance(ratio, numbers.Integral) else float(ratio)


def _weights(layout: KVLayout, ratio: float) -> list[Fraction]:
    """Tokens of each group's pool per token of full capacity.

    They are exact fractions, and 0.8 means the decimal number that was typed. In floating point, a rounding error of
    0.8 * N could cost a whole page."""
    of_windowed = Fraction(str(ratio)) if is_splittable(layout) else Fraction(1)
    return [of_windowed if group.spec.is_windowed else Fraction(1) for group in layout.groups]


def _ratio_quota(layout: KVLayout, num_slabs: int, ratio: float) -> tuple[int, ...]:
    # Count of each slab only what the group that wastes most of it can use. Then the pools never take more than
    # num_slabs - 1 slabs.
    usable_units = min(group.pages_per_slab * group.page_units for group in layout.groups)
    usable_bytes = max(0, num_slabs - 1) * usable_units * layout.unit_bytes
    return tuple(
        tokens // layout.page_tokens // group.pages_per_slab
        for tokens, group in zip(split_tokens(layout, usable_bytes, ratio), layout.groups, strict=True)
    )


def _capped_quota(layout: KVLayout, num_slabs: int, most_pages: tuple[int, ...]) -> tuple[int, ...]:
    """Slabs of each group's pool: windowed groups get `most_pages` (but enough for `_shortage` to let them pass, and no
    more than the default ratio gives); full groups share the rest, each the same number of tokens."""
    quota = list(_ratio_quota(layout, num_slabs, DEFAULT_RATIO))
    for index, group in enumerate(layout.groups):
        if group.spec.is_windowed:
            pages = max(most_pages[index], _least_tokens(layout, group) // layout.page_tokens + 1)
            quota[index] = min(quota[index], ceil_div(pages, group.pages_per_slab))
    rest = max(0, num_slabs - 1 - sum(quota[i] for i, group in enumerate(layout.groups) if group.spec.is_windowed))
    full = [(index, group) for index, group in enumerate(layout.groups) if not group.spec.is_windowed]

    def slabs_of(num_pages: int) -> list[int]:
        return [num_pages // group.pages_per_slab for _, group in full]

    most = rest * max(group.pages_per_slab for _, group in full)
    num_pages = _largest(most, lambda count: sum(slabs_of(count)) <= rest)
    for (index, _), slabs in zip(full, slabs_of(num_pages), strict=True):
        quota[index] = slabs
    return tuple(quota)


def _pool_pages(layout: KVLayout, quota: tuple[int, ...]) -> list[int]:
    return [slabs * group.pages_per_slab for slabs, group in zip(quota, layout.groups, strict=True)]


def _least_tokens(layout: KVLayout, group: KVGroup) -> int:
    """Window + page: a windowed pool must hold more tokens than this."""
    assert group.spec.reach_tokens is not None
    return group.spec.reach_tokens + layout.page_tokens


def _shortage(layout: KVLayout, quota: tuple[int, ...], needed_pages: tuple[int, ...]) -> str | None:
    """What is wrong with these pools; None: nothing."""
    for group, pages, needed in zip(layout.groups, _pool_pages(layout, quota), needed_pages, strict=True):
        tokens = pages * layout.page_tokens
        if group.spec.is_windowed and is_splittable(layout) and tokens <= _least_tokens(layout, group):
            return (
                f"the pool of {group.name} would hold {tokens} tokens, which must be more than window + page = "
                f"{group.spec.reach_tokens} + {layout.page_tokens}"
            )
        if pages < needed:
            return (
                f"the pool of {group.name} would hold {pages} pages, and one request needs {needed} with a chunk "
                "and an eviction interval of one page"
            )
    return None


def _chunk_fits(layout: KVLayout, pool_pages: list[int], chunk_tokens: int, length: int, num_blocks_more: int) -> bool:
    return all(
        group.spec.max_prefill_pages(
            page_tokens=layout.page_tokens,
            chunk_tokens=chunk_tokens,
            max_model_len=length,
            num_blocks_more=num_blocks_more,
        )
        <= pages
        for group, pages in zip(layout.groups, pool_pages, strict=True)
    )


def _interval_fits(
    layout: KVLayout,
    pool_pages: list[int],
    interval_tokens: int,
    length: int,
    num_blocks_more: int,
    num_draft_tokens: int,
) -> bool:
    return all(
        group.spec.max_decode_pages(
            page_tokens=layout.page_tokens,
            interval_tokens=interval_tokens,
            max_model_len=length,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        <= pages
        for group, pages in zip(layout.groups, pool_pages, strict=True)
    )


def _rule(layout: KVLayout, ratio: float | None, enable_prefix_caching: bool) -> str:
    if not is_splittable(layout):
        return "one kind of layers"
    if ratio is None and not enable_prefix_caching:
        return f"windowed pools for max_num_seqs requests, at most swa_full_tokens_ratio={DEFAULT_RATIO}"
    return f"swa_full_tokens_ratio={DEFAULT_RATIO if ratio is None else ratio}"


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Largest n in [0, upper] for which `fits` holds; 0 if there is none. `fits` must hold up to some n and for none
    above."""
    return bisect.bisect_left(range(1, upper + 1), True, key=lambda n: not fits(n))


def _smallest(fits: Callable[[int], bool]) -> int:
    """Smallest n >= 1 for which `fits` holds. `fits` must hold from some n on, and for none below."""
    upper = 1
    while not fits(upper):
        upper *= 2
    return 1 + bisect.bisect_left(range(1, upper + 1), True, key=fits)
