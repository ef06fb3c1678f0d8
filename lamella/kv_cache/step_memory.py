"""What a step reads and writes: the memory's part of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lamella.kv_cache.page_transfers import PageCopies, PageMoves


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of the step, for R requests with T new tokens; see AttentionMetadata for the arrays."""

    block_tables: np.ndarray  # int64 [R, width]; width may exceed what any row needs, and is NULL_PAGE there
    first_blocks: np.ndarray  # int64 [R]
    first_keys: np.ndarray  # int64 [R]
    slot_mapping: np.ndarray  # int64 [T]; -1: the token's KV is not written
    copies: PageCopies


@dataclass(frozen=True, slots=True)
class StepMemory:
    groups: tuple[GroupPlan, ...]
    moves: tuple[PageMoves, ...]  # in this order: a page may move on, and its place be used again
    first_step_slot: int  # slots from here on lie in step pages: what they hold is for this step alone
