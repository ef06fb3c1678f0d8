"""The sampler against plain Python: full sorts, exact sums, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lamella.errors import InvariantError, LamellaError
from lamella.model_executor.sampling.sampler import Sampler, kept_tokens, uniform
from tests.helpers.sampling import make_batch, random_logits

GREEDY = {"temperature": 0.0}


def transposed(logits: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a [vocab, rows] matrix."""
    return logits.t().contiguous().t()


# Oracles: nothing below knows blocks, candidates or torch.


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def require(decided: bool) -> None:
    assert decided, "rounding would decide this; choose other values"


def oracle_kept(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, require: Callable = require
) -> dict[int, float]:
    """Kept token -> probability, most likely first. `require` refuses inputs that rounding would decide."""
    logits = row.double().tolist()
    probabilities = softmax(logits, temperature)
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    largest = probabilities[order[0]]
    if min_p > 0:
        require(all(abs(p / largest - min_p) > 1e-9 for p in probabilities))
    order = [token_id for token_id in order if probabilities[token_id] >= min_p * largest and probabilities[token_id]]
    if top_k > 0:
        order = order[:top_k]
    total = math.fsum(probabilities[token_id] for token_id in order)
    kept: list[int] = []
    for token_id in order:
        kept.append(token_id)
        share = math.fsum(probabilities[kept_id] for kept_id in kept) / total
        if top_p < 1:
            require(abs(share - top_p) > 1e-9)
            if share > top_p:
                break
    total = math.fsum(probabilities[token_id] for token_id in kept)
    return {token_id: probabilities[token_id] / total for token_id in kept}


def oracle_pick(distribution: dict[int, float], number: float) -> int:
    """Inverse CDF over the entries in their order."""
    cumulative: list[float] = []
    for token_id, probability in distribution.items():
        cumulative.append(probability)
        if math.fsum(cumulative) > number:
            return token_id
    return list(distribution)[-1]


def oracle_philox(seed: int, draw_index: int) -> float:
    """Philox4x64-10 (Salmon et al. 2011), first word of the block after counter `draw_index`, top 53 bits."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = draw_index + 1, 0, 0, 0
    k0, k1 = seed, 0
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & mask, (product0 >> 64) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return (c0 >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("draw_index", [0, 1, 2, 1000, 2**40])
def test_uniform_is_philox_of_seed_and_draw(seed: int, draw_index: int) -> None:
    assert uniform(seed, draw_index) == oracle_philox(seed, draw_index)
    assert 0.0 <= uniform(np.uint64(seed), np.int64(draw_index)) < 1.0


@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 1000, 4096])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("layout", [torch.clone, transposed])
def test_greedy_takes_the_lowest_of_the_largest(vocab_size: int, num_rows: int, layout) -> None:
    logits = random_logits(num_rows, vocab_size, seed=vocab_size, step=2.0).clamp(max=4.0)
    rows = logits.tolist()
    expected = [row.index(max(row)) for row in rows]
    assert vocab_size < 255 or all(row.count(max(row)) > 1 for row in rows)  # there are ties to break
    result = Sampler()(layout(logits), make_batch(*[GREEDY] * num_rows))
    assert result.token_ids.tolist() == expected
    assert result.token_ids.dtype == np.int64
    assert result.logprobs == {}


def test_greedy_agrees_with_torch_argmax_in_a_batch_with_samples() -> None:
    logits = random_logits(6, 3000, seed=1)
    batch = make_batch(GREEDY, {"seed": 1}, GREEDY, {"top_k": 5}, GREEDY, {"top_p": 0.5})
    token_ids = Sampler()(logits, batch).token_ids
    assert token_ids[::2].tolist() == logits.argmax(1)[::2].tolist()


@settings(max_examples=120, deadline=None)
@given(
    vocab_size=st.integers(1, 700),
    seed=st.integers(0, 10**6),
    step=st.sampled_from([None, 0.5, 3.0]),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 800)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0001, 1.0)),
)
def test_kept_set_equals_full_sort(vocab_size, seed, step, temperature, top_k, top_p, min_p) -> None:
    row = random_logits(1, vocab_size, seed=seed, step=step)[0]
    expected = oracle_kept(row, temperature, top_k, top_p, min_p, require=assume)
    kept = kept_tokens(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept.token_ids.tolist() == list(expected)
    np.testing.assert_allclose(kept.probabilities, list(expected.values()), rtol=1e-9)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 3000}, {"top_p": 0.97}, {"top_p": 0.9999}, {"min_p": 0.001}, {"top_k": 2000, "top_p": 0.9}],
)
@pytest.mark.parametrize("step", [None, 0.25])
def test_kept_set_of_a_wide_row(filters: dict, step: float | None) -> None:
    """More tokens are kept than there are blocks (79), so the search has to widen."""
    row = random_logits(1, 20_000, seed=7, step=step)[0] / 3
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    logits = row.double().numpy()
    order = np.lexsort((np.arange(len(logits)), -logits))
    probabilities = np.exp(logits[order] - logits.max())
    probabilities /= probabilities.sum()
    probabilities = probabilities[probabilities >= full["min_p"] * probabilities[0]]
    probabilities = probabilities[: full["top_k"] or None]
    share = np.cumsum(probabilities) / probabilities.sum()
    num_kept = len(share) if full["top_p"] == 1.0 else int((share < full["top_p"]).sum()) + 1
    assert num_kept > 79
    kept = kept_tokens(row, temperature=1.0, **full)
    np.testing.assert_array_equal(kept.token_ids, order[:num_kept])


def test_filters_keep_what_the_arithmetic_says() -> None:
    row = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))

    def kept(**filters) -> list[int]:
        return kept_tokens(row, temperature=1.0, **filters).token_ids.tolist()

    assert kept() == [1, 3, 4, 0, 2]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=99) == [1, 3, 4, 0, 2]
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_p=0.66) == [1, 3, 4]
    assert kept(top_p=0.001) == [1]
    assert kept(min_p=0.45) == [1, 3, 4]
    assert kept(min_p=1.0) == [1]
    # top_p is a share of what min_p and top_k left: 0.4 and 0.25 of 0.65.
    assert kept(top_k=2, top_p=0.62) == [1, 3]
    assert kept(top_k=2, top_p=0.61) == [1]
    assert kept(min_p=0.6, top_p=0.61) == [1]


def test_equal_logits_are_cut_at_the_lowest_ids() -> None:
    row = torch.zeros(1000)
    assert kept_tokens(row, temperature=1.0, top_k=3).token_ids.tolist() == [0, 1, 2]
    assert kept_tokens(row, temperature=1.0, top_p=0.25).token_ids.tolist() == list(range(250))
    row[700] = 1.0
    assert kept_tokens(row, temperature=1.0, top_k=3).token_ids.tolist() == [700, 0, 1]


def test_impossible_tokens_are_not_kept() -> None:
    row = torch.full((600,), -torch.inf)
    row[[3, 500]] = torch.tensor([1.0, 2.0])
    assert kept_tokens(row, temperature=1.0, top_k=10).token_ids.tolist() == [500, 3]
    batch = make_batch(*[{"draw_index": i} for i in range(50)], *[{"draw_index": i, "top_k": 9} for i in range(50)])
    drawn = Sampler()(row.repeat(100, 1), batch).token_ids
    assert set(drawn.tolist()) == {3, 500}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("vocab_size", [10, 300, 1000])
def test_draw_is_the_inverse_cdf_of_the_uniform(params: dict, vocab_size: int) -> None:
    num_draws = 60
    row = random_logits(1, vocab_size, seed=vocab_size)[0]
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    distribution = oracle_kept(row, full["temperature"], full["top_k"], full["top_p"], full["min_p"])
    if set(params) <= {"temperature"}:
        distribution = dict(sorted(distribution.items()))  # nothing is filtered: in order of id
    expected = [oracle_pick(distribution, oracle_philox(9, i)) for i in range(num_draws)]
    batch = make_batch(*[dict(params, seed=9, draw_index=i) for i in range(num_draws)])
    assert Sampler()(row.repeat(num_draws, 1), batch).token_ids.tolist() == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("params", [{}, {"top_k": 6}, {"top_p": 0.9}, {"temperature": 0.7, "min_p": 0.05}])
def test_frequencies_match_probabilities(params: dict) -> None:
    num_draws = 2000
    row = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0, -0.5, 1.0, 0.9, -3.0, 0.6])
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    expected = oracle_kept(row, full["temperature"], full["top_k"], full["top_p"], full["min_p"])
    batch = make_batch(*[dict(params, seed=1234, draw_index=i) for i in range(num_draws)])
    counts = np.bincount(Sampler()(row.repeat(num_draws, 1), batch).token_ids, minlength=10)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi_square = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in expected.items())
    # 99.9 % quantiles of chi square with 5 to 9 degrees of freedom lie between 20.5 and 27.9.
    assert len(expected) >= 6
    assert chi_square < 20.5


SEVEN = [
    {"seed": 3, "draw_index": 4},
    GREEDY,
    {"seed": 5, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"seed": 5, "draw_index": 1, "top_p": 0.95},
    {"seed": 2**64 - 1, "temperature": 1.7},
    {"seed": 8, "min_p": 0.02, "num_logprobs": 4},
    {"seed": 8, "draw_index": 77, "temperature": 2.0, "top_k": 900},
]


@pytest.mark.parametrize("vocab_size", [97, 2000, 20_000])
def test_token_does_not_depend_on_neighbours_or_layout(vocab_size: int) -> None:
    logits = random_logits(7, vocab_size, seed=vocab_size, step=0.125)
    sampler = Sampler()
    alone = np.array([sampler(logits[i : i + 1], make_batch(SEVEN[i])).token_ids[0] for i in range(7)])
    assert len(set(alone.tolist())) > 1
    for order in (list(range(7)), [6, 5, 4, 3, 2, 1, 0], [2, 0, 6]):
        rows = logits[order]
        batch = make_batch(*[SEVEN[i] for i in order])
        np.testing.assert_array_equal(sampler(rows, batch).token_ids, alone[order])
        np.testing.assert_array_equal(sampler(transposed(rows), batch).token_ids, alone[order])


def test_many_rows_with_the_same_draw_choose_alike() -> None:
    """More rows than are copied at once, in both layouts."""
    row = random_logits(1, 1000, seed=0)
    for params in ({"seed": 6}, {"seed": 6, "top_p": 0.9}, {"seed": 6, "num_logprobs": 0}):
        one = Sampler()(row, make_batch(params)).token_ids[0]
        for logits in (row.repeat(40, 1), transposed(row.repeat(40, 1))):
            assert set(Sampler()(logits, make_batch(*[params] * 40)).token_ids.tolist()) == {one}


def test_draws_differ_between_seeds_and_between_draws() -> None:
    row = torch.zeros(1, 5000)
    tokens = {
        int(Sampler()(row, make_batch({"seed": seed, "draw_index": draw})).token_ids[0])
        for seed in range(5)
        for draw in range(5)
    }
    assert len(tokens) >= 24  # 25 draws of 5,000 equals: a repetition is unlikely, two are not seen


@pytest.mark.parametrize("layout", [torch.clone, transposed])
@pytest.mark.parametrize("params", [GREEDY, {"seed": 1}, {"seed": 1, "top_k": 3}, {"seed": 1, "top_p": 0.9}])
def test_banned_tokens_are_never_chosen(params: dict, layout) -> None:
    row = torch.full((500,), -2.0)
    row[[10, 20, 300, 301]] = torch.tensor([9.0, 5.0, 4.5, 4.0])
    banned = {0: (10, 300), 2: (10,)}
    logits = layout(row.repeat(3, 1))
    before = logits.clone()
    for draw_index in range(20):
        drawn = Sampler()(logits, make_batch(*[dict(params, draw_index=draw_index)] * 3, banned=banned)).token_ids
        assert drawn[0] not in banned[0]
        assert drawn[2] != 10
        replaced = before[0].clone()
        replaced[[10, 300]] = -torch.inf
        assert drawn[0] == Sampler()(replaced[None], make_batch(dict(params, draw_index=draw_index))).token_ids[0]
        if params is GREEDY:
            assert drawn.tolist() == [20, 10, 20]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("layout", [torch.clone, transposed])
@pytest.mark.parametrize("step", [None, 1.0])
def test_logprobs_are_those_of_the_raw_model(step: float | None, layout) -> None:
    vocab_size = 900
    logits = random_logits(4, vocab_size, seed=11, step=step)
    best = int(logits[3].argmax())
    batch = make_batch(
        dict(GREEDY, num_logprobs=0),
        {"temperature": 2.0, "seed": 2, "num_logprobs": 5},
        {"seed": 2},
        {"temperature": 0.5, "top_k": 2, "seed": 3, "num_logprobs": vocab_size + 10},
        banned={3: (best,)},
    )
    result = Sampler()(layout(logits), batch)
    assert sorted(result.logprobs) == [0, 1, 3]
    for row, num_top in ((0, 0), (1, 5), (3, vocab_size)):
        entry = result.logprobs[row]
        raw = logits[row].double().tolist()
        log_probabilities = [math.log(p) for p in softmax(raw)]
        order = sorted(range(vocab_size), key=lambda token_id: (-raw[token_id], token_id))[:num_top]
        assert entry.token_id == result.token_ids[row]
        assert entry.logprob == pytest.approx(log_probabilities[entry.token_id], abs=1e-9)
        assert entry.rank == 1 + sum(value > raw[entry.token_id] for value in raw)
        assert entry.top_ids.tolist() == order
        assert (entry.top_ids.dtype, entry.top_logprobs.dtype) == (np.int64, np.float32)
        np.testing.assert_allclose(entry.top_logprobs, [log_probabilities[i] for i in order], rtol=1e-6, atol=1e-6)
    assert result.logprobs[0].rank == 1
    assert result.logprobs[3].rank > 1  # the most likely token was banned


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 2}, {"top_p": 0.5}, {"num_logprobs": 2}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_logits_are_told_and_leave_the_other_rows_alone(params: dict, value: float) -> None:
    logits = torch.linspace(-1, 1, 1800).reshape(3, 600)
    logits[1, 555] = value
    result = Sampler()(logits, make_batch(*[params] * 3))
    assert result.unusable.keys() == {1}
    assert result.unusable[1].startswith(f"the largest logit is {value}, so no token can be chosen")
    assert 0 <= result.token_ids[1] < 600
    without = Sampler()(logits[[0, 2]], make_batch(*[params] * 2))
    assert without.unusable == {}
    assert result.token_ids[[0, 2]].tolist() == without.token_ids.tolist()
    assert result.logprobs.keys() == ({0, 2} if "num_logprobs" in params else set())
    for row, alone in ((0, 0), (2, 1)):
        if row in result.logprobs:
            assert result.logprobs[row].logprob == without.logprobs[alone].logprob


def test_a_row_without_allowed_tokens_is_told_and_logits_come_back() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    result = Sampler()(logits, make_batch(GREEDY, GREEDY, banned={0: (0, 1, 2)}))
    assert result.unusable.keys() == {0}
    assert result.unusable[0].endswith("-inf from banning every token")
    assert result.token_ids[1] == 2
    assert torch.equal(logits, torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_filters_of_an_unusable_row_are_an_error(value: float) -> None:
    with pytest.raises(LamellaError, match=f"the largest logit is {value}"):
        kept_tokens(torch.tensor([0.0, value, 1.0]), temperature=1.0)


def test_rows_must_match_the_batch() -> None:
    with pytest.raises(InvariantError, match="3 rows"):
        Sampler()(torch.zeros(2, 5), make_batch(GREEDY, GREEDY, GREEDY))
    empty = Sampler()(torch.zeros(0, 5), make_batch())
    assert len(empty.token_ids) == 0


def test_top_k_of_one_is_greedy_whatever_the_seed() -> None:
    logits = random_logits(5, 800, seed=2, step=2.0)
    greedy = Sampler()(logits, make_batch(*[GREEDY] * 5))
    batch = make_batch(*[{"top_k": 1, "temperature": 2.0, "seed": i} for i in range(5)])
    np.testing.assert_array_equal(Sampler()(logits, batch).token_ids, greedy.token_ids)
    assert np.array_equal(
        Sampler()(logits, replace(batch, draw_index=batch.draw_index + 9)).token_ids, greedy.token_ids
    )
