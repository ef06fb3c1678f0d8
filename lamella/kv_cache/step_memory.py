"""What a step reads and writes: the memory's part of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lamella.kv_cache.page_transfers import PageCopies, PageMoves

NO_STAMP = -1  # of a table of which nothing is known


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of the step, for R requests with T new tokens; see AttentionMetadata for the arrays."""

    block_tables: np.ndarray  # int64 [R, width]; width may exceed what any row needs, and is NULL_PAGE there
    first_blocks: np.ndarray  # int64 [R]
    first_keys: np.ndarray  # int64 [R]
    slot_mapping: np.ndarray  # int64 [T]; -1: the token's KV is not written
    copies: PageCopies


@dataclass(frozen=True, slots=True)
class TableVersions:
    """Which rows' tables a plan has, for whoever keeps a copy of them by row and wants to know what changed.

    A row's table whose stamp is what it was has the entries that it had, and perhaps new blocks behind them. Of a table
    whose stamp is another, or NO_STAMP, any entry may differ. No two tables ever have the same stamp.
    """

    rows: np.ndarray  # int64 [R], each once
    stamps: np.ndarray  # int64 [num_groups, R]


@dataclass(frozen=True, slots=True)
class StepMemory:
    groups: tuple[GroupPlan, ...]
    tables: TableVersions
    moves: tuple[PageMoves, ...]  # in this order: a page may move on, and its place be used again
    first_step_slot: int  # slots from here on lie in step pages: what they hold is for this step alone
