"""The parts of a block manager one by one, for tests of a part alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from lamella.kv_cache.arena import Arena
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.memory_outlook import MemoryOutlook
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.pinned_prefixes import PinnedPrefixes
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.replay import ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.row_occupancy import RowOccupancy
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.row_windows import RowWindows
from lamella.kv_cache.settings import CacheSettings
from lamella.kv_cache.step_pages import StepPages


def make_parts(
    specs,
    *,
    page_tokens: int = 4,
    num_slabs: int = 60,
    num_rows: int = 4,
    max_model_len: int = 80,
    interval_tokens: int = 4,
    retention: RetentionPolicy | None = None,
    slab_quota: tuple[int, ...] | None = None,
    enable_prefix_caching: bool = True,
) -> SimpleNamespace:
    layout = build_layout(specs, page_tokens=page_tokens)
    settings = CacheSettings(
        num_slabs=num_slabs, num_rows=num_rows, max_model_len=max_model_len, interval_tokens=interval_tokens,
        enable_prefix_caching=enable_prefix_caching, retention=retention or RetentionPolicy(spare=False),
        slab_quota=slab_quota, windowed_replay=False, skips_prompts=False, step_pages_bytes=0,
    )  # fmt: skip
    rows = RowTables(len(layout.groups), num_rows, -(-max_model_len // page_tokens))
    arena = Arena(layout, num_slabs, slab_quota=slab_quota)
    tree = PrefixTree(
        tuple(group.spec for group in layout.groups), page_tokens=page_tokens, free_page=arena.free,
        keep_spare=settings.retention.keeps_spare,
    )  # fmt: skip
    step_pages, replay = StepPages(layout, num_slabs, 0), ReplayRule(layout)
    first_step_page = step_pages.first_page
    supply = PageSupply(layout, settings, replay, rows, tree, arena, first_step_page=first_step_page)
    chunks = ChunkPages(layout, settings, rows, supply, step_pages)
    windows = RowWindows(page_tokens, settings, rows, tree, supply)
    return SimpleNamespace(
        layout=layout, settings=settings, rows=rows, arena=arena, tree=tree, supply=supply, chunks=chunks,
        windows=windows,
        occupancy=RowOccupancy(
            page_tokens, replay, rows, tree, supply, chunks, windows, caches_prefixes=enable_prefix_caching
        ),
        commits=RowCommits(
            page_tokens, settings.retention, replay, rows, tree, supply, first_step_page=first_step_page
        ),
        outlook=MemoryOutlook(
            layout, settings, rows, tree, supply, chunks, PinnedPrefixes(layout, settings, tree)
        ),
    )  # fmt: skip


def occupy(parts: SimpleNamespace, row: int, num_tokens: int) -> None:
    """Put a request in the row that found nothing, with pages for so many tokens."""
    root = parts.tree.root(None)
    parts.tree.pin(root)
    parts.rows.frontier[row] = root
    assert parts.supply.extend(row, -(-num_tokens // parts.layout.page_tokens))


def tokens_of(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)
