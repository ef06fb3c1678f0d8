import numpy as np
import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.int8 import gather_rows_int8, linear_int8, quantize_int8

SHAPES = [(1, 1), (16, 4), (17, 5), (64, 640), (100, 63), (33, 300), (200, 513)]  # outputs, inputs


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_case(num_out, num_in, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator)
    return weight, torch.randn(num_rows, num_in, generator=generator), torch.randn(num_out, generator=generator)


def nearest_levels(weight):
    """Nearest level, ties to even, of the float32 quotient; float64 [N, K]."""
    rows = weight.numpy()
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(rows / scales).astype(np.float64))


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_quantisation_takes_the_nearest_level(num_out, num_in):
    weight, _, _ = random_case(num_out, num_in, 1)
    packed = quantize_int8(weight)
    scales = packed.scales[:num_out]
    assert torch.equal(scales, weight.abs().amax(dim=1) / 127)
    expected = nearest_levels(weight) * scales[:, None].double()
    assert torch.equal(packed.dequantize(), expected.float())
    bound = scales.double() * (0.5 + 2.0**-16)
    assert bool(((weight.double() - expected).abs() <= bound[:, None]).all())


def test_ties_round_to_even_and_extremes_reach_all_levels():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]])
    assert quantize_int8(weight).dequantize().tolist() == [[127, 0, 2, 2, 0, -2, -127, 126]]


def test_rows_of_zeros_and_of_denormals_become_zeros():
    weight = torch.zeros(3, 8)
    weight[1] = 1e-40
    weight[2, 3] = 1e30
    restored = quantize_int8(weight).dequantize()
    assert torch.equal(restored[:2], torch.zeros(2, 8))
    assert torch.allclose(restored[2], weight[2], rtol=1e-6)
    out = linear_int8(torch.ones(1, 8), quantize_int8(weight))
    assert out[0, :2].tolist() == [0.0, 0.0]


def chain_oracle(x, levels, scales):
    """sum = fma(x, q, sum), input by input. A product of float32 and int8 is exact in float64, and so, at these
    magnitudes, is its sum with a float32: one rounding a step, to float32, is the fused operation."""
    sums = torch.zeros(x.shape[0], levels.shape[0])
    for k in range(x.shape[1]):
        sums = (x[:, k, None].double() * levels[None, :, k].double() + sums.double()).float()
    return sums * scales


def few_bits(num_rows, num_in, generator):
    """Floats of 12 bits between 2^-3 and 2^3: their sums with levels need no more than a float64 has."""
    return torch.randint(-2048, 2048, (num_rows, num_in), generator=generator).float() / 256


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 30, 200])
def test_result_is_the_chain_over_the_inputs(num_out, num_in, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_out, num_in, generator=generator)
    packed = quantize_int8(weight)
    # 2^20 + 12 bits and fractions of 2^-8 round in float32 and not in float64
    x = few_bits(num_rows, num_in, generator) * torch.tensor([1.0, 4096.0]).repeat(num_in)[:num_in]
    scales = packed.scales[:num_out]
    levels = nearest_levels(weight)
    assert torch.equal(linear_int8(x, packed), chain_oracle(x, levels, scales))


@pytest.mark.parametrize("num_rows", [1, 2, 4, 6, 40])
def test_bias_is_added_and_results_are_near_float64(num_rows):
    weight, x, bias = random_case(77, 321, num_rows)
    packed = quantize_int8(weight)
    restored = packed.dequantize().double()
    exact = x.double() @ restored.T + bias.double()
    # a chain of K roundings: gamma_K * sum |x||w|, one more for the scale and one for the bias
    bound = (321 + 3) * 2.0**-24 * (x.double().abs() @ restored.abs().T + bias.abs())
    assert bool(((linear_int8(x, packed, bias) - exact).abs() <= bound).all())
    assert not torch.equal(linear_int8(x, packed, bias), linear_int8(x, packed))


@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_depend_on_its_company_or_the_threads(seed):
    weight, x, bias = random_case(150, 129, 230, seed)
    packed = quantize_int8(weight)
    whole = linear_int8(x, packed, bias)
    torch.set_num_threads(1)
    assert torch.equal(linear_int8(x, packed, bias), whole)
    torch.set_num_threads(2)
    begin = 0
    generator = torch.Generator().manual_seed(seed)
    while begin < x.shape[0]:
        rows = int(torch.randint(1, 12, (), generator=generator))
        assert torch.equal(linear_int8(x[begin : begin + rows], packed, bias), whole[begin : begin + rows])
        begin += rows
    order = torch.randperm(x.shape[0], generator=generator)
    assert torch.equal(linear_int8(x[order], packed, bias), whole[order])


def test_largest_levels_and_outliers_are_exact_sums():
    packed = quantize_int8(torch.full((16, 1024), 127.0))
    x = torch.ones(7, 1024)
    x[:, 5] = 2.0**15
    assert torch.equal(linear_int8(x, packed), torch.full((7, 16), (1023 + 2.0**15) * 127))


def test_not_finite_activations_stay_in_their_row():
    weight, x, _ = random_case(40, 30, 9)
    packed = quantize_int8(weight)
    clean = linear_int8(x, packed)
    x[4, 7] = float("nan")
    out = linear_int8(x, packed)
    assert bool(out[4].isnan().all())
    kept = [row for row in range(9) if row != 4]
    assert torch.equal(out[kept], clean[kept])


def test_no_rows_and_leading_dimensions():
    weight, x, _ = random_case(20, 12, 6)
    packed = quantize_int8(weight)
    assert linear_int8(x[:0], packed).shape == (0, 20)
    assert torch.equal(linear_int8(x.view(2, 3, 12), packed), linear_int8(x, packed).view(2, 3, 20))


def test_gathered_rows_are_the_dequantised_weights():
    weight, _, _ = random_case(100, 63, 1)
    packed = quantize_int8(weight)
    ids = torch.tensor([[0, 99, 17], [16, 15, 17]])
    assert torch.equal(gather_rows_int8(packed, ids), packed.dequantize()[ids])
    many = torch.arange(100).flip(0)
    assert torch.equal(gather_rows_int8(packed, many), packed.dequantize()[many])


def test_weights_are_a_quarter_of_float():
    packed = quantize_int8(torch.randn(256, 640))
    assert packed.num_bytes == 256 * 640 + 256 * 4


def test_errors_name_what_was_given():
    packed = quantize_int8(torch.randn(20, 12))
    with pytest.raises(ConfigError, match=r"torch.float64 \[3, 12\]"):
        linear_int8(torch.randn(3, 12).double(), packed)
    with pytest.raises(ConfigError, match=r"\[3, 13\].*\[..., 12\]"):
        linear_int8(torch.randn(3, 13), packed)
    with pytest.raises(ConfigError, match="not contiguous"):
        linear_int8(torch.randn(12, 3).T, packed)
    with pytest.raises(ConfigError, match=r"bias is torch.float32 \[19\].*\[20\]"):
        linear_int8(torch.randn(3, 12), packed, torch.randn(19))
    with pytest.raises(ConfigError, match=r"torch.int64 \[4\]"):
        quantize_int8(torch.arange(4))
    with pytest.raises(ConfigError, match="inf in row 1"):
        quantize_int8(torch.tensor([[1.0, 2.0], [float("inf"), 0.0]]))
    with pytest.raises(ConfigError, match="nan in row 0"):
        quantize_int8(torch.tensor([[float("nan"), 2.0]]))
    with pytest.raises(IndexError, match="id 20 was asked for; rows are 0 to 19"):
        gather_rows_int8(packed, torch.tensor([0, 20]))
    with pytest.raises(ConfigError, match=r"torch\.int32"):
        gather_rows_int8(packed, torch.tensor([0], dtype=torch.int32))
