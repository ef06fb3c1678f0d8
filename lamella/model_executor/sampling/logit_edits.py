"""Logits that are changed before a token is chosen: penalties for tokens that occurred, and bans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from lamella.attention.metadata import to_device
from lamella.model_executor.step_plan import SamplingBatch


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Entries of the logits, none twice, and how each is changed. The tensors lie on the CPU, or where the logits
    are."""

    rows: torch.Tensor  # int64 [n]
    token_ids: torch.Tensor  # int64 [n]
    factors: torch.Tensor  # float64 [3, n]: repetition penalty; what is subtracted; 1 for a ban, else 0

    @staticmethod
    def of(batch: SamplingBatch) -> LogitEdits | None:
        """The edits that a batch asks for, on the CPU; None: it asks for none."""
        parts = []
        for row, penalties in batch.penalties.items():
            token_ids, counts = penalties.token_ids, penalties.output_counts
            if row in batch.banned_token_ids:  # a banned token needs no penalty
                allowed = ~np.isin(token_ids, batch.banned_token_ids[row])
                token_ids, counts = token_ids[allowed], counts[allowed]
            subtracted = penalties.frequency * counts + penalties.presence * (counts > 0)
            parts.append((row, token_ids, np.full(len(token_ids), penalties.repetition), subtracted, 0.0))
        for row, banned in batch.banned_token_ids.items():
            token_ids = np.unique(np.array(banned, dtype=np.int64))
            parts.append((row, token_ids, np.ones(len(token_ids)), np.zeros(len(token_ids)), 1.0))
        if not sum(len(part[1]) for part in parts):
            return None
        rows = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
        factors = np.stack(
            [
                np.concatenate([part[2] for part in parts]),
                np.concatenate([part[3] for part in parts]),
                np.concatenate([np.full(len(part[1]), part[4]) for part in parts]),
            ]
        )
        token_ids = np.concatenate([part[1] for part in parts])
        return LogitEdits(torch.from_numpy(rows), torch.from_numpy(token_ids), torch.from_numpy(factors))

    def to(self, device: torch.device) -> LogitEdits:
        """The edits on the device. Nobody waits: the copies are done before whatever is put on the device's stream
        next."""
        return LogitEdits(*(to_device(tensor, device) for tensor in (self.rows, self.token_ids, self.factors)))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Overwrite the entries of logits [S, vocab]; returns what was there: [n].

        Computed in float64 and rounded once. Nothing here waits for the device.
        """
        saved = logits[self.rows, self.token_ids]
        repetition, subtracted, is_ban = self.factors
        values = saved.double()
        values = torch.where(values > 0, values / repetition, values * repetition) - subtracted
        logits[self.rows, self.token_ids] = values.masked_fill(is_ban > 0, -torch.inf).to(logits.dtype)
        return saved

    def undo(self, logits: torch.Tensor, saved: torch.Tensor) -> None:
        """Put back what `apply` returned."""
        logits[self.rows, self.token_ids] = saved


@contextmanager
def edited(logits: torch.Tensor, batch: SamplingBatch) -> Iterator[None]:
    """Penalties and bans of `batch` in `logits`, until the end of the block."""
    edits = LogitEdits.of(batch)
    if edits is None:
        yield
        return
    edits = edits.to(logits.device)
    saved = edits.apply(logits)
    try:
        yield
    finally:
        edits.undo(logits, saved)
