"""Products of rows with their experts' weights, in the interpreter: against float64, and each row by itself."""

from __future__ import annotations

import pytest
import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.torch_functions import gated_activation
from lamella.model_executor.layers.triton.clamped import clamped_activation
from lamella.model_executor.layers.triton.grouped import combined, grouped_product, sorted_rows
from lamella.model_executor.models.mlp_config import GateClamp
from tests.helpers.triton_cases import DEVICE

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def choose(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Some experts get many tokens, others none."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    scores[:, 0] += 0.7
    scores[:, num_experts // 2] = -1
    return scores.topk(top_k, dim=1).indices.to(DEVICE)


def test_pairs_are_sorted_by_expert():
    ids = torch.tensor([[2, 0], [0, 3], [2, 1]], device=DEVICE)
    order, begins = sorted_rows(ids, 5)
    assert order.tolist() == [1, 2, 5, 0, 4, 3]
    assert begins.tolist() == [0, 2, 3, 5, 6, 6]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "num_out", "num_in", "has_bias", "has_factors"),
    [
        (1, 4, 2, 32, 48, False, False),
        (7, 6, 3, 80, 40, True, False),
        (60, 5, 2, 48, 130, True, True),  # 24 rows for each on average, and tiles of 32
        (90, 3, 2, 70, 33, False, True),
        (0, 4, 2, 32, 48, True, False),
    ],
)
def test_products_are_those_of_the_experts(
    num_tokens, num_experts, top_k, num_out, num_in, has_bias, has_factors, dtype
):
    ids = choose(num_tokens, num_experts, top_k)
    x = random(num_tokens, num_in + 3, seed=1, dtype=dtype)[:, :num_in]  # rows that lie apart
    weight = random(num_experts * num_out, num_in, seed=2, dtype=dtype)
    bias = random(num_experts * num_out, seed=3, dtype=dtype) if has_bias else None
    factors = random(num_tokens * top_k, seed=4) if has_factors else None
    pairs = sorted_rows(ids, num_experts)
    found = grouped_product(x, pairs, weight, num_experts, pairs_per_row=top_k, bias=bias, factors=factors)
    assert found.dtype == dtype
    rows = x.double().repeat_interleave(top_k, dim=0)
    if factors is not None:
        rows = (rows * factors[:, None]).to(dtype).double()
    each = weight.double().view(num_experts, num_out, num_in)[ids.flatten()]
    expected = torch.einsum("pk,pnk->pn", rows, each)
    if bias is not None:
        expected += bias.double().view(num_experts, num_out)[ids.flatten()]
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_row_does_not_depend_on_who_else_takes_its_expert():
    """As long as the tiles are of one size: up to 16 rows for each expert on average."""
    num_experts, top_k = 6, 2
    ids, x = choose(40, num_experts, top_k), random(40, 96, seed=1)
    weight = random(num_experts * 48, 96, seed=2)

    def product(tokens: list[int]) -> torch.Tensor:
        pairs = sorted_rows(ids[tokens], num_experts)
        return grouped_product(x[tokens], pairs, weight, num_experts, pairs_per_row=top_k).unflatten(0, (-1, top_k))

    expected = product(list(range(40)))
    for tokens in ([3], [0, 39], [17, 4, 30, 2, 11]):
        assert torch.equal(product(tokens), expected[tokens])


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
def test_what_experts_give_is_added_up(has_weights, has_shared):
    given, weights, shared = random(15, 1030, seed=1), random(5, 3, seed=2), random(5, 1030, seed=3)
    found = combined(given, weights if has_weights else None, shared if has_shared else None, 3)
    expected = given.double().view(5, 3, 1030) * (weights.double()[:, :, None] if has_weights else 1)
    expected = expected.sum(1) + (shared if has_shared else 0)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("after_activation", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bounds_of_activations(activation, after_activation, has_bias):
    slope, up_offset = (1.702, 1.0) if activation == "silu" else (1.0, 0.0)
    clamp = GateClamp(limit=1.5, after_activation=after_activation, slope=slope, up_offset=up_offset)
    gate_up, bias = 3 * random(5, 2 * 1100, seed=1), random(2 * 1100, seed=2) if has_bias else None
    found = clamped_activation(gate_up, activation, clamp, bias)
    expected = gated_activation((gate_up + (0 if bias is None else bias)).double(), activation, clamp)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit():
    ids, weight = choose(4, 3, 2), random(3 * 16, 32, seed=1)
    pairs = sorted_rows(ids, 3)
    with pytest.raises(InvariantError, match=r"x has 3 rows of 2 pairs each .* there are 8 pairs"):
        grouped_product(random(3, 32, seed=2), pairs, weight, 3, pairs_per_row=2)
    with pytest.raises(InvariantError, match=r"kernels take \[rows, 32\]"):
        grouped_product(random(4, 31, seed=2), pairs, weight, 3, pairs_per_row=2)
