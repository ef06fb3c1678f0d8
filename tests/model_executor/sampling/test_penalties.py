"""Penalties on logits against transformers' processor and a formula, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.model_executor.layers.native_heads import NativeScores
from lamella.model_executor.sampling.head_sampling import sample_from_head
from lamella.model_executor.sampling.logit_edits import edited
from lamella.model_executor.sampling.sampler import Sampler, uniform
from lamella.model_executor.step_plan import TokenPenalties
from tests.helpers.sampling import make_batch, random_logits
from tests.helpers.sampling_oracle import distribution, penalised

GREEDY = {"temperature": 0.0}
PROMPT, OUTPUT = [3, 9, 9, 40, 11], [9, 50, 50, 50, 12, 3]


def penalties_of(
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> TokenPenalties:
    token_ids = sorted({*prompt, *output})
    return TokenPenalties(
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        token_ids=np.array(token_ids, dtype=np.int64),
        output_counts=np.array([output.count(token_id) for token_id in token_ids], dtype=np.int64),
    )


def transposed(logits: torch.Tensor) -> torch.Tensor:
    return logits.t().contiguous().t()


@pytest.mark.parametrize("repetition", [1.3, 0.7, 100.0])
@pytest.mark.parametrize("layout", [torch.clone, transposed])
def test_repetition_is_that_of_transformers(repetition: float, layout) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(3, 60, seed=1)
    assert (logits[1, PROMPT] > 0).any()
    assert (logits[1, PROMPT] < 0).any()
    batch = make_batch(*[GREEDY] * 3, penalties={1: penalties_of(PROMPT, OUTPUT, repetition=repetition)})
    expected = logits.clone()
    expected[1:2] = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([PROMPT + OUTPUT]), logits[1:2])
    given = layout(logits)
    with edited(given, batch):
        torch.testing.assert_close(given, expected, rtol=2e-7, atol=0)
    assert torch.equal(given, logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"presence": 0.6},
        {"frequency": 0.3},
        {"presence": -0.5, "frequency": -1.5},
        {"repetition": 1.2, "presence": 1.0, "frequency": 0.1},
    ],
)
def test_what_is_subtracted_counts_the_output_only(settings: dict) -> None:
    logits = random_logits(2, 60, seed=2)
    batch = make_batch(GREEDY, GREEDY, penalties={0: penalties_of(PROMPT, OUTPUT, **settings)})
    before = logits.clone()
    with edited(logits, batch):
        expected = penalised(before[0].numpy(), PROMPT, OUTPUT, **settings)
        np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-7)
        assert torch.equal(logits[1], before[1])
    assert torch.equal(logits, before)


def test_penalties_come_before_everything_but_log_probabilities() -> None:
    """Greedy and drawn, with filters; the banned token is penalised, too, and stays banned."""
    row = random_logits(1, 60, seed=3) / 2
    best = int(row[0].argmax())
    output = [*OUTPUT, *row[0].argsort(descending=True)[1:4].tolist(), best]
    settings = {"repetition": 1.1, "presence": 0.5, "frequency": 0.4}
    changed = penalised(row[0].numpy(), PROMPT, output, **settings)
    changed[best] = -np.inf
    filters = [{}, {"top_k": 4}, {"top_p": 0.7, "temperature": 0.6}, {"min_p": 0.1}]
    params = [dict(GREEDY, num_logprobs=2), *[dict(one, seed=5, draw_index=i) for i, one in enumerate(filters)]]
    batch = make_batch(
        *params,
        banned=dict.fromkeys(range(5), (best,)),
        penalties={place: penalties_of(PROMPT, output, **settings) for place in range(5)},
    )
    result = Sampler()(row.repeat(5, 1), batch)
    expected = [int(changed.argmax())]
    for draw_index, one in enumerate(filters):
        of_row = distribution(changed, **one)
        assert of_row.is_decided(uniform(5, draw_index))
        expected.append(of_row.pick(uniform(5, draw_index)))
    assert result.token_ids.tolist() == expected
    raw = row[0].double().log_softmax(0)
    assert result.logprobs[0].logprob == pytest.approx(float(raw[expected[0]]), abs=1e-9)
    assert result.logprobs[0].top_ids[0] == best
    assert result.logprobs[0].rank > 1


def test_a_head_that_writes_few_columns_writes_all_for_penalised_rows() -> None:
    """Rows of a batch with and without penalties give what they give with all logits at hand."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(200, 8, generator=generator)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    logits = multiply(hidden)
    params = [GREEDY, GREEDY, {"seed": 1, "top_k": 5}, {"seed": 1, "top_k": 5}, {"seed": 2}, {"seed": 2}]
    top = logits.argsort(descending=True)[:, :3].tolist()
    penalties = {place: penalties_of(top[place], top[place], presence=2.0, repetition=3.0) for place in (1, 3, 5)}
    batch = make_batch(*params, penalties=penalties)
    result = sample_from_head(Sampler(), NativeScores(hidden, 200, None, multiply, None), batch)
    expected = Sampler()(logits.clone(), batch).token_ids
    assert result.token_ids.tolist() == expected.tolist()
    unchanged = Sampler()(logits.clone(), make_batch(*params)).token_ids
    assert (expected != unchanged).tolist()[:2] == [False, True]
