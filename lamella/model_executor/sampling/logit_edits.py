"""Logits that are changed before a token is chosen, in vLLM's order.

1. masks and bans: what may not be produced gets -inf
2. biases are added
3. a request's own functions see the logits and return others; then 1 holds again, whatever they did
4. penalties for tokens that occurred

Most edits concern a few entries of a row (`LogitEdits`). These are overwritten, and put back once a token is chosen.
Masks and functions concern whole rows, of which a copy is changed (`edit_whole_rows`). What is computed for a row
depends on nothing but the row, and log-probabilities are those of the logits before all edits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from lamella.attention.metadata import to_device
from lamella.errors import InvariantError
from lamella.model_executor.step_plan import RowProcessors, SamplingBatch

_BIAS, _REPETITION, _SUBTRACTED, _IS_BAN = range(4)


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Entries of the logits, none twice, and how each is changed. The tensors lie on the CPU, or where the logits
    are."""

    rows: torch.Tensor  # int64 [n]
    token_ids: torch.Tensor  # int64 [n]
    factors: torch.Tensor  # float64 [4, n]: bias; repetition penalty; what is subtracted; 1 for a ban, else 0

    @staticmethod
    def of(batch: SamplingBatch) -> LogitEdits | None:
        """The bans, biases and penalties that a batch asks for, on the CPU; None: it asks for none."""
        rows = dict.fromkeys((*batch.penalties, *batch.banned_token_ids, *batch.biases))
        parts = [(row, *_of_row(batch, row)) for row in rows]
        if not sum(len(token_ids) for _, token_ids, _ in parts):
            return None
        return LogitEdits(
            torch.from_numpy(np.concatenate([np.full(len(token_ids), row) for row, token_ids, _ in parts])),
            torch.from_numpy(np.concatenate([token_ids for _, token_ids, _ in parts])),
            torch.from_numpy(np.concatenate([factors for _, _, factors in parts], axis=1)),
        )

    def to(self, device: torch.device) -> LogitEdits:
        """The edits on the device. Nobody waits: the copies are done before whatever is put on the device's stream
        next."""
        return LogitEdits(*(to_device(tensor, device) for tensor in (self.rows, self.token_ids, self.factors)))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Overwrite the entries of logits [S, vocab]; returns what was there: [n].

        Computed in float64 and rounded once. Nothing here waits for the device.
        """
        saved = logits[self.rows, self.token_ids]
        bias, repetition, subtracted, is_ban = self.factors
        values = saved.double() + bias
        values = torch.where(values > 0, values / repetition, values * repetition) - subtracted
        logits[self.rows, self.token_ids] = values.masked_fill(is_ban > 0, -torch.inf).to(logits.dtype)
        return saved

    def undo(self, logits: torch.Tensor, saved: torch.Tensor) -> None:
        """Put back what `apply` returned."""
        logits[self.rows, self.token_ids] = saved


@contextmanager
def edited(logits: torch.Tensor, batch: SamplingBatch) -> Iterator[None]:
    """Bans, biases and penalties of `batch` in `logits`, until the end of the block."""
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


def whole_rows(batch: SamplingBatch) -> np.ndarray:
    """The rows of which a mask or a function may change anything, int64, ascending."""
    return np.array(sorted({*batch.masks, *batch.processors}), dtype=np.int64)


def without_rows(batch: SamplingBatch, rows: np.ndarray) -> SamplingBatch:
    """The batch with nothing to do for `rows` (int64) but to find the largest logit."""
    temperature = batch.temperature.copy()
    temperature[rows] = 0.0
    left_out = set(rows.tolist())
    return replace(
        batch,
        temperature=temperature,
        banned_token_ids={row: entry for row, entry in batch.banned_token_ids.items() if row not in left_out},
        penalties={row: entry for row, entry in batch.penalties.items() if row not in left_out},
        biases={row: entry for row, entry in batch.biases.items() if row not in left_out},
        masks={},
        processors={},
    )


def edit_whole_rows(logits: torch.Tensor, batch: SamplingBatch) -> dict[int, str]:
    """All edits of `batch` in `logits`, a copy, float32 [S, vocab] with contiguous rows, and they stay there.

    Returns the rows whose functions failed, with the reason; what is in these rows then has no meaning.
    """
    penalties_after = {row: penalties for row, penalties in batch.penalties.items() if row in batch.processors}
    others = {row: penalties for row, penalties in batch.penalties.items() if row not in batch.processors}
    _apply(logits, replace(batch, penalties=others))
    for row, mask in batch.masks.items():
        _apply_mask(logits[row], mask)
    problems: dict[int, str] = {}
    for row, processors in batch.processors.items():
        try:
            logits[row] = _run(processors, logits[row])
        except _FunctionError as error:
            problems[row] = str(error)
    if batch.processors:
        banned = {row: ids for row, ids in batch.banned_token_ids.items() if row in batch.processors}
        _apply(logits, replace(batch, penalties=penalties_after, banned_token_ids=banned, biases={}))
        for row, mask in batch.masks.items():
            if row in batch.processors:
                _apply_mask(logits[row], mask)
    return problems


def _of_row(batch: SamplingBatch, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a row whose logits change, each once: int64 [n]; and their factors: float64 [4, n]."""
    penalties, biases, banned = batch.penalties.get(row), batch.biases.get(row), batch.banned_token_ids.get(row)
    named = [] if penalties is None else [penalties.token_ids]
    named += [] if biases is None else [biases.token_ids]
    named += [] if banned is None else [np.unique(np.array(banned, dtype=np.int64))]
    is_sorted = len(named) > 1
    token_ids = np.unique(np.concatenate(named)) if is_sorted else named[0]

    def places(ids: np.ndarray) -> np.ndarray | slice:
        return np.searchsorted(token_ids, ids) if is_sorted else slice(None)

    factors = np.zeros((4, len(token_ids)))
    factors[_REPETITION] = 1.0
    if biases is not None:
        factors[_BIAS, places(biases.token_ids)] = biases.values
    if penalties is not None:
        counts, of_them = penalties.output_counts, places(penalties.token_ids)
        factors[_REPETITION, of_them] = penalties.repetition
        factors[_SUBTRACTED, of_them] = penalties.frequency * counts + penalties.presence * (counts > 0)
    if banned is not None:
        factors[_IS_BAN, places(named[-1])] = 1.0
    return token_ids, factors


def _apply(logits: torch.Tensor, batch: SamplingBatch) -> None:
    edits = LogitEdits.of(batch)
    if edits is not None:
        edits.to(logits.device).apply(logits)


def _apply_mask(row: torch.Tensor, mask: np.ndarray) -> None:
    """-inf where the mask (uint32 [ceil(vocab / 32)]) allows nothing, in a row of logits [vocab]."""
    vocab_size = len(row)
    if mask.dtype != np.uint32 or mask.shape != (-(-vocab_size // 32),):
        raise InvariantError(
            f"a mask of {mask.dtype} {list(mask.shape)} for {vocab_size} tokens; give uint32 [{-(-vocab_size // 32)}]"
        )
    # The words are little-endian in memory, so the bits of their bytes, lowest first, are in the order of the tokens.
    bits = np.unpackbits((~mask).astype("<u4").view(np.uint8), count=vocab_size, bitorder="little")
    row.masked_fill_(to_device(bits.view(np.bool_), row.device), -torch.inf)


class _FunctionError(Exception):
    """A function of a request failed. The message is the reason to give."""


def _run(processors: RowProcessors, row: torch.Tensor) -> torch.Tensor:
    """What the functions make of a row of logits float32 [vocab]. Raises _FunctionError."""
    given = row
    for index, function in enumerate(processors.functions):
        name = f"logits_processors[{index}]"
        try:
            row = function(processors.prompt_token_ids, processors.output_token_ids, row)
        except Exception as error:  # a function may raise anything, and no other request is to suffer from it
            raise _FunctionError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(row, torch.Tensor):
            raise _FunctionError(f"{name} returned a {type(row).__name__}; return the logits, a tensor [{len(given)}]")
        if row.shape != given.shape or not row.is_floating_point() or row.device != given.device:
            raise _FunctionError(
                f"{name} returned {row.dtype} {list(row.shape)} on {row.device}; return the logits, floating point "
                f"[{len(given)}] on {given.device}"
            )
        row = row.to(given.dtype)
    return row
