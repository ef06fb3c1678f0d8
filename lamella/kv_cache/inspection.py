"""A look inside a block manager, for checks, tests and tools."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kv_cache.arena import Arena
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.pinned_prefixes import PinnedPrefixes
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.step_pages import StepPages


@dataclass(frozen=True, slots=True)
class Inspection:
    """The parts of a block manager themselves, not copies. They are for reading: no contract covers what happens when
    someone changes them. `BlockManager.clear` replaces them all by new ones."""

    rows: RowTables
    tree: PrefixTree
    arena: Arena
    supply: PageSupply
    step_pages: StepPages
    chunks: ChunkPages
    commits: RowCommits
    pins: PinnedPrefixes
