"""Page contents that a step puts elsewhere before it writes anything: first moves, in their order, then copies."""

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
    """Whole pages of one group to move before anything else (compaction): src[i] -> dst[i].

    No page is both a source and a target, and the sources ascend. For the arena the moves are done already: it does not
    count the sources as in use.
    """

    group: int
    src_pages: np.ndarray  # int64 [M]
    dst_pages: np.ndarray  # int64 [M]
