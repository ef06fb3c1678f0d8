"""A greedy row with a mask, from a head that finds its largest columns: the largest logit that the mask allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.model_executor.layers.native_heads import NativeScores, top_by_parts
from lamella.model_executor.sampling.head_sampling import MAX_TOP, sample_from_head
from lamella.model_executor.sampling.sampler import Sampler
from tests.helpers.sampling import make_batch

VOCAB = 300


def scores_of(logits: torch.Tensor, *, reads_all: list[int]) -> NativeScores:
    """A head whose logits are given. reads_all: gets the number of rows, each time that whole rows are asked for."""

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        reads_all.append(len(rows))
        return logits[rows[:, 0].long()]

    def find_top(rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        return top_by_parts(lambda x, a, b: logits[x[:, 0].long(), a:b].contiguous(), rows, VOCAB, num_top)

    hidden = torch.arange(len(logits), dtype=torch.float32)[:, None]
    return NativeScores(hidden, VOCAB, None, multiply, find_top)


def mask_of(allowed: np.ndarray) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token_id in np.flatnonzero(allowed).tolist():
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


@pytest.mark.parametrize("share", [0.9, 0.1, 0.01])
def test_the_largest_logit_that_is_allowed(share: float) -> None:
    random = np.random.default_rng(int(100 * share))
    logits = torch.from_numpy(random.integers(-20, 20, (40, VOCAB)).astype(np.float32))  # with many equals
    allowed = random.random((40, VOCAB)) < share
    allowed[np.arange(40), random.integers(0, VOCAB, 40)] = True
    masks = {row: mask_of(allowed[row]) for row in range(0, 40, 2)}
    reads_all: list[int] = []
    batch = make_batch(*[{"temperature": 0.0}] * 40, masks=masks)
    found = sample_from_head(Sampler(), scores_of(logits, reads_all=reads_all), batch)
    for row in range(40):
        permitted = np.flatnonzero(allowed[row]) if row in masks else np.arange(VOCAB)
        best = permitted[logits[row].numpy()[permitted].argmax()]  # argmax takes the first of equals
        assert found.token_ids[row] == best
    # Whole rows are read where none of the largest columns is allowed, and for no others.
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :MAX_TOP]
    num_without = sum(not allowed[row, order[row]].any() for row in masks)
    assert sum(reads_all) == num_without
    assert (num_without > 0) == (share == 0.01)
    assert not found.unusable


def test_rows_that_need_all_their_logits_read_them() -> None:
    """Sampled, with log-probabilities, with a ban beside the mask: as the sampler does with whole rows."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    masks = {row: mask_of(np.arange(VOCAB) % 3 == 0) for row in range(4)}
    settings = [{"temperature": 1.0, "seed": 5}, {"temperature": 0.0, "num_logprobs": 2}, {"temperature": 0.0}, {}]
    batch = make_batch(*settings, masks=masks, banned={2: (int(logits[2, ::3].argmax()) * 3,)})
    found = sample_from_head(Sampler(), scores_of(logits, reads_all=[]), batch)
    whole = Sampler()(logits.clone(), batch)
    assert found.token_ids.tolist() == whole.token_ids.tolist()
    assert found.logprobs.keys() == whole.logprobs.keys() == {1}
    assert found.token_ids[2] != int(logits[2, ::3].argmax()) * 3


def test_unusable_logits_are_told_as_from_whole_rows() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[0, 7], logits[1, 6] = torch.nan, torch.nan
    masks = {row: mask_of(np.arange(VOCAB) == 6) for row in (0, 1)} | {2: mask_of(np.zeros(VOCAB, bool))}
    batch = make_batch(*[{"temperature": 0.0}] * 3, masks=masks)
    found = sample_from_head(Sampler(), scores_of(logits, reads_all=[]), batch)
    assert found.token_ids[0] == 6  # the logit that is no number is one that the mask forbids
    assert found.unusable.keys() == {1, 2}
    assert found.unusable == Sampler()(logits.clone(), batch).unusable
