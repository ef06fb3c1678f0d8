"""Texts whose rotary embedding changes when they grow beyond a length (LongRoPE, arXiv 2402.13753).

A text of more than `short_text_tokens` tokens takes the embedding of long texts from its first token on. So a text that
grows beyond that length begins anew, because the K and V that it had are those of a short text. Long texts share K and
V only with long texts. The results are those of computing the whole text at once, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows

_LONG = "\0long"  # ends the salt of long texts


class LongTexts:
    """short_text_tokens: None where a model has one embedding for all texts; then no text is long."""

    def __init__(self, short_text_tokens: int | None) -> None:
        self._short_text_tokens = short_text_tokens

    def mark(self, request: Request) -> None:
        """Make `request`, which is in no row, a long text if it has grown to be one."""
        limit = self._short_text_tokens
        if limit is not None and not request.is_long and len(request.token_ids) > limit:
            request.is_long = True
            request.salt = (request.salt or "") + _LONG

    def outgrown(self, rows: RequestRows, running: Iterable[int], num_tokens: np.ndarray) -> list[int]:
        """Rows that must begin anew before they compute more. num_tokens: int64 [num_rows], how many tokens each row
        has when all planned steps have run."""
        limit = self._short_text_tokens
        if limit is None:
            return []
        return [row for row in running if num_tokens[row] > limit and not rows.request(row).is_long]

    def num_short_tokens(self, rows: RequestRows, row: int) -> int | None:
        """How many tokens the row may have, drafts included, before what it computes is a long text's; None: any
        number."""
        return None if rows.request(row).is_long else self._short_text_tokens

    def flags(self, rows: RequestRows, scheduled: np.ndarray) -> np.ndarray | None:
        """bool [R], which of the scheduled rows are long texts; None: none are."""
        if self._short_text_tokens is None:
            return None
        found = np.array([rows.request(row).is_long for row in scheduled.tolist()], dtype=bool)
        return found if found.any() else None
