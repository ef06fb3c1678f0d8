"""Every edit of logits, alone and with the others, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.native_heads import NativeScores
from lamella.model_executor.sampling.head_sampling import sample_from_head
from lamella.model_executor.sampling.sampler import Sampler
from lamella.model_executor.step_plan import StepResult
from tests.helpers.edit_cases import CASES, PARAMS, VOCAB, batch_of, expected_token, sharpen
from tests.helpers.sampling import make_batch, random_logits


def assert_same(found: StepResult, expected: StepResult) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.unusable == expected.unusable
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, one in expected.logprobs.items():
        assert (found.logprobs[row].logprob, found.logprobs[row].rank) == (one.logprob, one.rank)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_tokens_are_those_of_the_oracle_and_the_logits_come_back(params: dict, is_transposed: bool) -> None:
    """A row for each case, and one without edits between any two: it gets what it gets alone."""
    row = random_logits(1, VOCAB, seed=8)
    logits = row.repeat(2 * len(CASES), 1)
    given = logits.t().contiguous().t() if is_transposed else logits.clone()
    cases = {2 * place: case for place, case in enumerate(CASES)}
    result = Sampler()(given, batch_of(cases, [params] * len(logits)))
    assert torch.equal(given, logits)
    plain = Sampler()(row, make_batch(params))
    assert result.unusable == {}
    expected = [expected_token(row[0].numpy(), case, params) for case in CASES]
    assert result.token_ids[::2].tolist() == expected
    assert result.token_ids[1::2].tolist() == plain.token_ids.tolist() * len(CASES)
    assert len({*expected, *plain.token_ids.tolist()}) > 3
    raw = row[0].double().log_softmax(0)
    for place, found in result.logprobs.items():
        assert found.logprob == pytest.approx(float(raw[result.token_ids[place]]), abs=1e-9)
    assert len(result.logprobs) == (len(logits) if "num_logprobs" in params else 0)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_alone_gives_what_it_gives_in_a_batch(params: dict) -> None:
    logits = random_logits(len(CASES), VOCAB, seed=9)
    together = Sampler()(logits.clone(), batch_of(dict(enumerate(CASES)), [params] * len(CASES)))
    for place, case in enumerate(CASES):
        alone = Sampler()(logits[place : place + 1].clone(), batch_of({0: case}, [params]))
        assert alone.token_ids[0] == together.token_ids[place]
        if place in together.logprobs:
            assert alone.logprobs[0].logprob == together.logprobs[place].logprob


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_head_that_writes_few_columns_gives_the_same_to_the_bit(params: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * len(CASES), 8, generator=generator)
    weight = torch.randn(VOCAB, 8, generator=generator)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight @ one for one in x])  # a row's product, whatever the batch

    batch = batch_of({2 * place: case for place, case in enumerate(CASES)}, [params] * len(hidden))
    found = sample_from_head(Sampler(), NativeScores(hidden, VOCAB, None, multiply, None), batch)
    assert_same(found, Sampler()(multiply(hidden), batch))


def raises(prompt, output, logits):
    raise KeyError("no such state")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "logits_processors[1] raised KeyError: 'no such state'"),
        (lambda prompt, output, logits: None, f"returned a NoneType; return the logits, a tensor [{VOCAB}]"),
        (lambda prompt, output, logits: logits[:5], f"float32 [5] on cpu; return the logits, floating point [{VOCAB}]"),
        (lambda prompt, output, logits: logits.long(), f"returned torch.int64 [{VOCAB}] on cpu"),
        (lambda prompt, output, logits: logits * torch.nan, "the largest logit is nan"),
        (lambda prompt, output, logits: torch.full_like(logits, -torch.inf), "the largest logit is -inf"),
    ],
)  # fmt: skip
def test_a_function_that_fails_makes_its_own_row_unusable(function, message: str) -> None:
    logits = random_logits(3, VOCAB, seed=10)
    params = [{"seed": 1, "num_logprobs": 1}] * 3
    good = {0: {"functions": (sharpen,)}, 2: {"allowed": {1, 2, 3}}}
    bad = batch_of({**good, 1: {"functions": (sharpen, function)}}, params)
    found = Sampler()(logits.clone(), bad)
    assert found.unusable.keys() == {1}
    assert message in found.unusable[1]
    without = Sampler()(logits[[0, 2]].clone(), batch_of({0: good[0], 1: good[2]}, params[:2]))
    assert found.token_ids[[0, 2]].tolist() == without.token_ids.tolist()


def test_a_functions_float64_logits_are_rounded() -> None:
    logits = random_logits(1, VOCAB, seed=11)
    double = {0: {"functions": (lambda prompt, output, values: values.double() + 1e-12,)}}
    found = Sampler()(logits.clone(), batch_of(double, [{"seed": 3}]))
    assert found.token_ids.tolist() == Sampler()(logits, make_batch({"seed": 3})).token_ids.tolist()


@pytest.mark.parametrize("mask", [np.zeros(9, dtype=np.uint32), np.zeros(10, dtype=np.int32)])
def test_a_mask_of_another_width_or_type_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(InvariantError, match=r"300 tokens; give uint32 \[10\]"):
        Sampler()(random_logits(1, VOCAB, seed=1), make_batch({"temperature": 0.0}, masks={0: mask}))
