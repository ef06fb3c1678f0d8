"""Experts on the native kernels: the kernels that they are made of, float64, and the same bits in any company."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch.nn import functional

from lamella.errors import ConfigError
from lamella.native.experts import Experts, RoutingRule, route
from lamella.native.gguf_linear import pack_gguf
from lamella.native.layer_linear import LinearLayer
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate, GatedMLP
from tests.helpers.native_layers import KINDS, mxfp4_blocks, random
from tests.helpers.native_layers import make_layer as make

COUNT, TOP_K, HIDDEN, WIDTH = 6, 3, 64, 96
# 2 rows for each expert come in a few, 1,300 rows are more of an expert than go through at once
ROWS = 1300


def make_experts(kind: str, *, scales_input: bool = False, has_shared: bool = False, gate: Gate | None = None):
    """(experts, the same token by token from their kernels)."""
    rule, gate = RoutingRule("softmax", COUNT, TOP_K, is_renormalised=True), gate or Gate("silu")
    router = LinearLayer([pack_weight(random(COUNT, HIDDEN, seed=50))], bias=random(COUNT, seed=51))
    ups = [make(kind, 2 * WIDTH, HIDDEN, seed) for seed in range(COUNT)]
    downs = [make(kind, HIDDEN, WIDTH, 20 + seed) for seed in range(COUNT)]
    up, down, shared_gate = make(kind, 2 * WIDTH, HIDDEN, 40), make(kind, HIDDEN, WIDTH, 41), make(kind, 1, HIDDEN, 42)
    experts = Experts(
        router, rule, [each[0] for each in ups], [each[0] for each in downs], gate, scales_input=scales_input,
        shared=GatedMLP(up[0], down[0], gate) if has_shared else None,
        shared_gate=shared_gate[0] if has_shared else None,
    )  # fmt: skip

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        ids, weights = route(router(x), rule)
        out = torch.zeros_like(x)
        if has_shared:
            out = down[1](activated(up[1](x), gate)) * shared_gate[1](x).sigmoid()
        for row in range(len(x)):
            for expert, weight in sorted(zip(ids[row].tolist(), weights[row], strict=True)):
                taken = x[row : row + 1] * weight if scales_input else x[row : row + 1]
                given = downs[expert][1](activated(ups[expert][1](taken), gate))
                out[row] += (given if scales_input else given * weight)[0]
        return out

    return experts, one_by_one


ACTIVATIONS = {
    "silu": lambda x, slope: x * (x * slope).sigmoid(),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "gelu": lambda x, _: functional.gelu(x),
    "relu_squared": lambda x, _: x.clamp(min=0) ** 2,
}


def activated(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    value, up = gate_up.chunk(2, dim=1)
    limit = gate.limit or float("inf")
    if not gate.limits_activated:
        value = value.clamp(max=limit)
    value = ACTIVATIONS[gate.activation](value, gate.slope)
    if gate.limits_activated:
        value = value.clamp(max=limit)
    return value * (up.clamp(-limit, limit) + gate.up_offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scales_input", "has_shared", "gate"),
    [
        (False, False, Gate("silu")),
        (True, True, Gate("gelu_tanh")),
        (False, True, Gate("silu", 7.0, False, 1.702, 1.0)),
        (False, False, Gate("silu", 3.0, True)),
        (False, True, Gate("gelu", 2.0, True)),
        (True, False, Gate("relu_squared")),
    ],
)
def test_experts_are_their_kernels(kind, scales_input, has_shared, gate):
    experts, one_by_one = make_experts(kind, scales_input=scales_input, has_shared=has_shared, gate=gate)
    x = random(9, HIDDEN, seed=3)
    torch.testing.assert_close(experts(x), one_by_one(x), atol=3e-4, rtol=3e-5)
    assert experts(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_in_any_company(kind):
    experts, _ = make_experts(kind, has_shared=True)
    x = random(ROWS, HIDDEN, seed=3)
    x[40:] += 2 * x[0]  # many take the same experts
    expected = experts(x)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for rows in (*order.split([1, 1, 2, 3, 5, 12, 60, 300, 916]), torch.arange(ROWS)):
            assert torch.equal(experts(x[rows]), expected[rows])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 21, 22, 60])
def test_a_meter_counts_passes_over_weights_and_changes_no_bit(num_rows):
    experts, _ = make_experts("mxfp4")
    router = LinearLayer([pack_weight(random(COUNT, HIDDEN, seed=50))], bias=random(COUNT, seed=51))
    x = random(num_rows, HIDDEN, seed=num_rows)
    ids = route(router(x), RoutingRule("softmax", COUNT, TOP_K, is_renormalised=True))[0]
    expected = experts(x)
    meter = experts.measure()
    assert meter.tolist() == [0] * (2 + COUNT)
    assert torch.equal(experts(x), expected)
    assert torch.equal(experts(x), expected)
    is_taken = (ids[:, :, None] == torch.arange(COUNT)).any(dim=(0, 1))
    assert torch.equal(meter[2:], 2 * is_taken.long())


@pytest.mark.parametrize("count", [1, 3, 7])
def test_mxfp4_experts_give_the_bits_of_float_experts(count):
    """Odd numbers of experts, and widths that are no whole number of a panel's blocks."""
    rule, gate = RoutingRule("softmax", count, max(1, count - 1)), Gate("silu", 7.0, False, 1.702, 1.0)
    router = LinearLayer([pack_weight(random(count, HIDDEN, seed=50))])
    sizes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    data = [[mxfp4_blocks(*size, seed=10 * each + size[1]) for each in range(count)] for size in sizes]
    blocks = [[LinearLayer([pack_gguf(each, "MXFP4")]) for each in part] for part in data]
    storage = gguf.GGMLQuantizationType.MXFP4
    floats = [
        [LinearLayer([pack_weight(torch.from_numpy(gguf.quants.dequantize(each, storage)))]) for each in part]
        for part in data
    ]
    ours, theirs = Experts(router, rule, *blocks, gate), Experts(router, rule, *floats, gate)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 4, 5, 9, 40, 100):
            x = random(num_rows, HIDDEN, seed=num_rows)
            assert torch.equal(ours(x), theirs(x))


def test_a_bias_of_each_expert_counts():
    rule = RoutingRule("sigmoid", 2, 1)
    router = LinearLayer([pack_weight(torch.tensor([[1.0], [-1.0]]))])
    zero = pack_weight(torch.zeros(32, 1))
    ups = [LinearLayer([zero], bias=torch.full((32,), value)) for value in (1.0, 2.0)]
    downs = [LinearLayer([pack_weight(torch.zeros(1, 16))], bias=torch.tensor([value])) for value in (3.0, 5.0)]
    experts = Experts(router, rule, ups, downs, Gate("silu"))
    x = torch.tensor([[2.0], [-3.0]])
    torch.testing.assert_close(experts(x), torch.tensor([[3.0], [5.0]]) * x.abs().sigmoid())


def test_layers_that_make_no_experts():
    rule, gate = RoutingRule("softmax", 2, 1), Gate("silu")

    def layer(num_out: int, num_in: int) -> LinearLayer:
        return LinearLayer([pack_weight(torch.zeros(num_out, num_in))])

    router, up, down = layer(2, 16), layer(64, 16), layer(16, 32)
    Experts(router, rule, [up] * 2, [down] * 2, gate)
    with pytest.raises(ConfigError, match="2 experts were given 2 logits, 1 gate_up_projs and 2 down_projs"):
        Experts(router, rule, [up], [down] * 2, gate)
    with pytest.raises(ConfigError, match="do not follow each other"):
        Experts(router, rule, [up, layer(32, 16)], [down] * 2, gate)
    with pytest.raises(ConfigError, match="experts are of one size"):
        Experts(router, rule, [up, layer(32, 16)], [down, layer(16, 16)], gate)
    with pytest.raises(ConfigError, match=r"the router takes 8 inputs and the experts \[16\]"):
        Experts(layer(2, 8), rule, [up] * 2, [down] * 2, gate)
    with pytest.raises(ConfigError, match="shared_gate has 2 outputs"):
        Experts(router, rule, [up] * 2, [down] * 2, gate, shared=GatedMLP(up, down, gate), shared_gate=layer(2, 16))
