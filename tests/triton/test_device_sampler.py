"""The device's choice of a token against full sorts in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamella.errors import InvariantError
from lamella.model_executor.sampling.device.choose import UNIFORM
from lamella.model_executor.sampling.device.device_sampler import DeviceSampler, row_parameters
from lamella.model_executor.sampling.sampler import Sampler, uniform
from lamella.model_executor.sampling.sampler_choice import choose_sampler
from lamella.model_executor.step_plan import TokenPenalties
from tests.helpers import edit_cases
from tests.helpers.pairwise import pairwise
from tests.helpers.sampling import make_batch, random_logits
from tests.helpers.sampling_oracle import distribution, penalised

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = {"temperature": 0.0}


def sample(logits: torch.Tensor, *rows: dict, block_columns: int = 32, **more: Any):
    return DeviceSampler(block_columns)(logits.clone().to(DEVICE), make_batch(*rows, **more)).result()


def draw(row: torch.Tensor, params: dict, numbers: list[float], block_columns: int) -> list[int]:
    """What each uniform number gives of the row of logits [vocab]."""
    logits = row.repeat(len(numbers), 1).to(DEVICE)
    parameters = row_parameters(make_batch(*[params] * len(numbers)), logits.shape[1])
    parameters[UNIFORM.value] = numbers
    return DeviceSampler(block_columns).choose(logits, parameters)[0].tolist()


CASES = pairwise(
    {
        "vocab_size": [30, 64, 90],
        "block_columns": [32, 64],
        "step": [None, 0.5],
        "offset": [0.0, 30.0, -300.0],
        "dtype": [torch.float32, torch.bfloat16],
        "temperature": [0.3, 1.0, 1.9],
        "top_k": [0, 1, 2, 20, 500],
        "top_p": [1.0, 0.93, 0.41, 0.001],
        "min_p": [0.0, 0.011, 0.31, 1.0],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_combination_of_filters_keeps_and_draws_what_sorting_does(case: dict[str, Any]) -> None:
    """Numbers at the edges of the shares of the first and last token kept: one token more or less would move them."""
    logits = random_logits(1, case["vocab_size"], seed=CASES.index(case), step=case["step"]) / 1.5 + case["offset"]
    row = logits[0].to(case["dtype"])
    filters = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    if filters["top_k"] >= case["vocab_size"]:
        filters["top_k"] = 0
    expected = distribution(row.double().numpy(), **filters)
    numbers = expected.telling_numbers()
    tokens = draw(row, {name: case[name] for name in filters}, numbers, case["block_columns"])
    assert tokens == [expected.pick(number) for number in numbers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 700])
def test_greedy_takes_the_lowest_of_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(3, vocab_size, seed=vocab_size, step=2.0).clamp(max=4.0).to(dtype)
    rows = logits.tolist()
    assert vocab_size < 64 or all(row.count(max(row)) > 1 for row in rows)
    result = sample(logits, *[GREEDY] * 3)
    assert result.token_ids.tolist() == [row.index(max(row)) for row in rows]
    assert result.token_ids.dtype == np.int64
    assert result.logprobs == {}


def test_zeros_of_either_sign_are_equal() -> None:
    logits = torch.full((1, 70), -1.0)
    logits[0, [40, 65]] = torch.tensor([-0.0, 0.0])
    assert sample(logits, GREEDY).token_ids.tolist() == [40]
    expected = distribution(logits[0].numpy(), top_k=2)
    assert expected.token_ids.tolist() == [40, 65]
    assert draw(logits[0], {"top_k": 2}, [0.2, 0.8], 32) == [40, 65]


MIXED = [
    {"seed": 3, "draw_index": 4},
    GREEDY,
    {"seed": 5, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"seed": 5, "draw_index": 1, "top_p": 0.95},
    {"seed": 2**64 - 1, "temperature": 1.7},
    {"seed": 8, "min_p": 0.02, "num_logprobs": 4},
    {"seed": 8, "draw_index": 77, "temperature": 2.0, "top_k": 60},
]


def test_a_rows_draw_is_that_of_its_seed_and_index_whatever_the_batch() -> None:
    """The same row alone, in batches of other rows, and in one without any draws besides it."""
    logits = random_logits(7, 100, seed=4, step=0.125)
    filters = ("temperature", "top_k", "top_p", "min_p")
    expected = []
    for row, params in enumerate(MIXED):
        if params is GREEDY:
            expected.append(int(logits[row].argmax()))
            continue
        of_row = distribution(logits[row].numpy(), **{name: params[name] for name in filters if name in params})
        number = uniform(params["seed"], params.get("draw_index", 0))
        assert of_row.is_decided(number)
        expected.append(of_row.pick(number))
    for order in ([0, 1, 2, 3, 4, 5, 6], [3, 1], [4], [2]):
        result = sample(logits[order], *[MIXED[row] for row in order])
        assert result.token_ids.tolist() == [expected[row] for row in order]
        for place, entry in result.logprobs.items():
            assert order[place] == 5
            values = logits[5].double()
            assert entry.logprob == pytest.approx(float(values.log_softmax(0)[expected[5]]), abs=1e-6)
    assert len(set(expected)) > 4


def test_column_major_logits_and_rows_with_gaps() -> None:
    logits = random_logits(3, 90, seed=1)
    params = [GREEDY, {"seed": 1}, {"seed": 2, "top_k": 4}]
    expected = sample(logits, *params).token_ids.tolist()
    transposed = logits.t().contiguous().t().to(DEVICE)
    padded = torch.full((3, 128), torch.inf, device=DEVICE)
    padded[:, :90] = logits.to(DEVICE)
    for view in (transposed, padded[:, :90]):
        assert DeviceSampler(32)(view, make_batch(*params)).result().token_ids.tolist() == expected


@pytest.mark.parametrize("params", [GREEDY, {"seed": 1}, {"seed": 1, "top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bans_and_penalties(params: dict, dtype: torch.dtype) -> None:
    """A token both banned and penalised stays banned; the logits come back; the row beside is as it was."""
    logits = (random_logits(1, 40, seed=2) / 2).repeat(2, 1).to(dtype)
    best, second, third = logits[0].float().argsort(descending=True)[:3].tolist()
    prompt, output = [second, 5], [third, third, best, 7]
    settings = {"repetition": 1.3, "presence": 0.4, "frequency": 0.25}
    changed = penalised(logits[0].double().numpy(), prompt, output, **settings)
    changed[best] = -np.inf
    ids = np.array([third, best, 7, second, 5])
    penalties = TokenPenalties(**settings, token_ids=ids, output_counts=np.array([2, 1, 1, 0, 0]))
    filters = {name: value for name, value in params.items() if name != "seed"}
    on_device = logits.clone().to(DEVICE)
    for draw_index in range(2):
        rows = [dict(params, draw_index=draw_index)] * 2
        batch = make_batch(*rows, banned={0: (best, best)}, penalties={0: penalties})
        tokens = DeviceSampler(32)(on_device, batch).result().token_ids.tolist()
        if params is GREEDY:
            assert tokens == [int(changed.argmax()), best]
            continue
        number = uniform(1, draw_index)
        expected = [distribution(values, **filters) for values in (changed, logits[1].double().numpy())]
        assert all(one.is_decided(number) for one in expected)
        assert tokens == [one.pick(number) for one in expected]
    assert torch.equal(on_device.cpu(), logits)


@pytest.mark.parametrize("params", edit_cases.PARAMS[:2], ids=str)
def test_every_edit_gives_what_it_gives_on_the_host(params: dict) -> None:
    """All of them in one row, two kinds in two others, and a plain row between them."""
    row = random_logits(1, edit_cases.VOCAB, seed=8)
    logits = row.repeat(4, 1).to(DEVICE)
    cases = {0: edit_cases.CASES[-1], 1: edit_cases.CASES[1], 3: edit_cases.CASES[5]}
    batch = edit_cases.batch_of(cases, [params] * 4)
    result = DeviceSampler(64)(logits, batch).result()
    assert torch.equal(logits.cpu(), row.repeat(4, 1))
    for place, case in cases.items():
        assert result.token_ids[place] == edit_cases.expected_token(row[0].numpy(), case, params)
    assert result.token_ids[2] == sample(row, params).token_ids[0]
    host = Sampler()(row.repeat(4, 1), batch)
    assert result.logprobs.keys() == host.logprobs.keys()
    for place, found in result.logprobs.items():
        assert found.logprob == pytest.approx(host.logprobs[place].logprob, abs=1e-5)
        assert found.rank == host.logprobs[place].rank


@pytest.mark.parametrize("layout", [torch.clone, lambda logits: logits.t().contiguous().t()])
def test_scores_of_given_tokens_are_the_hosts(layout) -> None:
    logits = random_logits(5, 90, seed=4)
    token_ids, num_logprobs = np.array([3, 89, 0, 40, int(logits[4].argmax())]), np.array([0, 2, 90, 1, 0])
    found = DeviceSampler(32).score(layout(logits).to(DEVICE), token_ids, num_logprobs)
    raw = logits.double().log_softmax(-1)
    for row, one in enumerate(found):
        assert one.token_id == token_ids[row]
        assert one.logprob == pytest.approx(float(raw[row, one.token_id]), abs=2e-6)
        assert one.rank == 1 + int((raw[row] > raw[row, one.token_id]).sum())
        assert one.top_ids.tolist() == raw[row].argsort(descending=True, stable=True)[: num_logprobs[row]].tolist()
    host = Sampler().score(layout(logits), token_ids, num_logprobs)
    assert [(one.token_id, one.rank, one.top_ids.tolist()) for one in host] == [
        (one.token_id, one.rank, one.top_ids.tolist()) for one in found
    ]
    assert [one.logprob for one in host] == pytest.approx(raw[range(5), token_ids].tolist(), abs=1e-9)


def test_a_function_that_fails_makes_its_own_row_unusable() -> None:
    cases = {1: {"functions": (lambda prompt, output, logits: None,)}, 2: {"allowed": {4, 5}}}
    logits = random_logits(3, edit_cases.VOCAB, seed=9).to(DEVICE)
    result = DeviceSampler(64)(logits, edit_cases.batch_of(cases, [GREEDY] * 3)).result()
    assert result.unusable.keys() == {1}
    assert "logits_processors[0] returned a NoneType" in result.unusable[1]
    assert result.token_ids[[0, 2]].tolist() == [int(logits[0].argmax()), 4 + int(logits[2, 4:6].argmax())]


@pytest.mark.parametrize("params", [GREEDY, {"seed": 1}, {"top_k": 2}])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800000], ids=["nan", "negative nan", "inf"])
def test_unusable_logits_are_told_by_result_and_leave_an_id_of_the_vocabulary(params: dict, bits: int) -> None:
    values = np.zeros((3, 100), dtype=np.uint32)
    values[1, 77] = bits
    logits = torch.from_numpy(values.view(np.float32))
    sampled = DeviceSampler(32)(logits.to(DEVICE), make_batch(*[params] * 3))
    assert sampled.token_ids[1].item() == 77
    result = sampled.result()
    assert result.unusable.keys() == {1}
    assert result.unusable[1].startswith(f"the largest logit is {logits[1, 77]}")
    # The rows beside it are what they are alone.
    others = DeviceSampler(32)(logits[[0, 2]].to(DEVICE), make_batch(*[params] * 2)).result()
    assert others.unusable == {}
    assert result.token_ids[[0, 2]].tolist() == others.token_ids.tolist()


def test_log_probabilities_are_for_usable_rows() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 40] = torch.nan
    result = DeviceSampler(32)(logits.to(DEVICE), make_batch(*[{"num_logprobs": 1}] * 3)).result()
    assert result.logprobs.keys() == {0, 2}
    assert result.logprobs[2].logprob == pytest.approx(-np.log(100), abs=1e-6)


def test_a_row_without_allowed_tokens_is_told() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    sampled = DeviceSampler(16)(logits.to(DEVICE), make_batch(GREEDY, {"seed": 1}, banned={1: (0, 1, 2)}))
    assert sampled.token_ids[0].item() == 2
    assert sampled.token_ids[1].item() in (0, 1, 2)
    result = sampled.result()
    assert result.unusable.keys() == {1}
    assert result.unusable[1].endswith("-inf from banning every token")


def test_impossible_tokens_are_not_drawn() -> None:
    """-inf between, before and behind the two possible tokens, whole blocks of it included."""
    row = torch.full((200,), -torch.inf)
    row[[3, 120]] = torch.tensor([1.0, 2.0])
    for params, order in (({}, [3, 120]), ({"top_k": 9}, [120, 3]), ({"top_p": 0.999}, [120, 3])):
        assert draw(row, params, [0.0, 1.0 - 2.0**-53], 16) == order


@pytest.mark.parametrize("step", [None, 1.0])
def test_logprobs_are_those_of_the_logits_as_given(step: float | None) -> None:
    vocab_size = 70
    logits = random_logits(4, vocab_size, seed=11, step=step)
    logits[3, [5, 17, 66]] = -torch.inf
    best = int(logits[3].argmax())
    rows = [
        dict(GREEDY, num_logprobs=0),
        {"temperature": 2.0, "seed": 2, "num_logprobs": 3},
        {"seed": 2},
        {"temperature": 0.5, "top_k": 2, "seed": 3, "num_logprobs": vocab_size + 10},
    ]
    result = sample(logits, *rows, banned={3: (best,)})
    assert sorted(result.logprobs) == [0, 1, 3]
    for row, num_top in ((0, 0), (1, 3), (3, vocab_size)):
        entry = result.logprobs[row]
        raw = logits[row].double().numpy()
        log_probabilities = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        order = np.lexsort((np.arange(vocab_size), -raw))[:num_top]
        assert entry.token_id == result.token_ids[row]
        assert entry.logprob == pytest.approx(log_probabilities[entry.token_id], abs=1e-6)
        assert entry.rank == 1 + int((raw > raw[entry.token_id]).sum())
        assert entry.top_ids.tolist() == order.tolist()
        assert (entry.top_ids.dtype, entry.top_logprobs.dtype) == (np.int64, np.float32)
        np.testing.assert_allclose(entry.top_logprobs, log_probabilities[order], rtol=1e-6, atol=1e-6)
    assert result.logprobs[3].rank > 1  # the most likely token was banned


def test_rows_must_match_the_batch() -> None:
    with pytest.raises(InvariantError, match="3 rows"):
        DeviceSampler(16)(torch.zeros(2, 5, device=DEVICE), make_batch(GREEDY, GREEDY, GREEDY))
    sampled = DeviceSampler(16)(torch.zeros(0, 5, device=DEVICE), make_batch())
    assert sampled.token_ids.shape == (0,)
    assert len(sampled.result().token_ids) == 0


def test_cuda_gets_the_device_sampler_where_triton_is_installed() -> None:
    assert isinstance(choose_sampler(torch.device("cuda")), DeviceSampler)
    assert not isinstance(choose_sampler(torch.device("cpu")), DeviceSampler)
