"""What a step reads and writes: the memory's part of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lamella.kv_cache.page_transfers import PageCopies, PageMoves

NO_STAMP = -1  # stands for a table of which nothing is known


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of the step, for R requests with T new tokens in all. AttentionMetadata explains the arrays."""

    block_tables: np.ndarray  # int64 [R, width]; width may exceed what any row needs, and is NULL_PAGE there
    first_blocks: np.ndarray  # int64 [R]
    first_keys: np.ndarray  # int64 [R]
    slot_mapping: np.ndarray  # int64 [T]; -1: the token's KV is not written
    copies: PageCopies


@dataclass(frozen=True, slots=True)
class TableVersions:
    """Which rows' tables a plan has, and their stamps: for whoever keeps a copy of the tables by row, and wants to know
    what has changed.

    A table whose stamp is the same as before has the same entries as before, and perhaps new blocks behind them. In a
    table with another stamp, or with NO_STAMP, any entry may differ. No two tables ever have the same stamp.
    """

    rows: np.ndarray  # int64 [R], each once
    stamps: np.ndarray  # int64 [num_groups, R]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """All that a step must know of the KV memory, from BlockManager.plan_step."""

    groups: tuple[GroupPlan, ...]
    tables: TableVersions
    moves: tuple[PageMoves, ...]  # in this order: a later one may move a page on, or into a place that became free
    first_step_slot: int  # slots with this number or a greater one lie in step pages, which hold KV for this step only
