"""Contents of pages that a step puts elsewhere before it writes anything: moves first, in their order, then copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Whole pages of one group to copy before the step runs (copy on write): src[i] -> dst[i]."""

    src_pages: np.ndarray  # int64 [C]
    dst_pages: np.ndarray  # int64 [C]


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Whole pages of one group to move before anything else (compaction): src[i] -> dst[i], disjoint; sources ascend.

    For the arena they are made already: the sources are not in use any more.
    """

    group: int
    src_pages: np.ndarray  # int64 [M]
    dst_pages: np.ndarray  # int64 [M]
