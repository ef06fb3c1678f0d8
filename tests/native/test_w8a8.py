import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.int8 import linear_int8
from lamella.native.w8a8 import ACTIVATION_LEVELS, GROUP_INPUTS, linear_w8a8, quantize_w8a8


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_case(num_out, num_in, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator)
    return quantize_w8a8(weight), torch.randn(num_rows, num_in, generator=generator)


def oracle(x, weight):
    """Levels, integer sums and the chain over groups, each step in float64 before it is rounded."""
    sums = torch.zeros(x.shape[0], weight.num_out)
    for begin in range(0, weight.num_in, GROUP_INPUTS):
        group = x[:, begin : begin + GROUP_INPUTS]
        largest = group.abs().amax(1, keepdim=True)
        inverse = torch.where(largest >= 1e-30, torch.full_like(largest, ACTIVATION_LEVELS) / largest, 0.0)
        levels = (group.double() * inverse.double()).round().to(torch.int64)  # ties to even
        assert int(levels.abs().max()) <= 2**15 - 1
        integers = levels @ weight.levels()[:, begin : begin + GROUP_INPUTS].to(torch.int64).T
        scales = torch.where(largest >= 1e-30, largest / ACTIVATION_LEVELS, 0.0)
        sums = (integers.float().double() * scales.double() + sums.double()).float()
    return sums * weight.scales[: weight.num_out]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 8, 13, 200])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(1, 1), (16, 128), (17, 5), (64, 640), (100, 63), (33, 300), (50, 1025)]
)
def test_result_is_the_integer_sums_scaled(num_out, num_in, num_rows):
    weight, x = random_case(num_out, num_in, num_rows, seed=num_rows)
    assert torch.equal(linear_w8a8(x, weight), oracle(x, weight))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_levels_do_not_overflow(sign):
    weight = quantize_w8a8(torch.full((32, 512), 127.0))
    largest = torch.full((7, 512), 32767.0)
    assert torch.equal(linear_w8a8(sign * largest, weight), oracle(sign * largest, weight))
    assert linear_w8a8(sign * largest, weight)[6, 31].item() == pytest.approx(sign * 512 * 32767 * 127, rel=1e-6)
    alternating = torch.tensor([1.0, -1.0]).repeat(256)
    weight = quantize_w8a8(sign * 127 * alternating.repeat(32, 1))
    assert torch.equal(
        linear_w8a8(largest * alternating, weight),
        linear_w8a8(sign * largest, quantize_w8a8(torch.full((32, 512), 127.0))),
    )


def test_levels_round_to_nearest_and_ties_to_even():
    weight = quantize_w8a8(torch.eye(8) * 127)
    x = torch.tensor([[32767.0, 0.5, 1.5, 2.5, -0.5, -1.5, 32766.5, 0.4]])
    levels = [32767, 0, 2, 2, 0, -2, 32766, 0]
    assert linear_w8a8(x, weight).tolist() == [[127 * level for level in levels]]


def test_an_outlier_costs_its_group_and_no_other():
    weight, x = random_case(64, 1024, 3)
    exact = x.double() @ weight.dequantize().double().T
    rest = [k for k in range(1024) if not 256 <= k < 384]
    x[:, 300] = 1e6
    out = linear_w8a8(x, weight).double() - 1e6 * weight.dequantize()[:, 300].double()
    only_rest = x[:, rest].double() @ weight.dequantize()[:, rest].double().T
    # all else in the outlier's group is rounded away; the others keep their digits
    assert float((out - only_rest).norm() / exact.norm()) < 0.03


def test_error_stays_in_its_bound():
    weight, x = random_case(90, 700, 20)
    restored = weight.dequantize().double()
    bound = torch.zeros(20, 90, dtype=torch.float64)
    for begin in range(0, 700, GROUP_INPUTS):
        step = x[:, begin : begin + GROUP_INPUTS].abs().amax(1).double() / ACTIVATION_LEVELS
        bound += step[:, None] * 0.5001 * restored[:, begin : begin + GROUP_INPUTS].abs().sum(1)
    error = (linear_w8a8(x, weight) - x.double() @ restored.T).abs()
    assert bool((error <= bound + 1e-4).all())
    # Activations are rounded, and to 16 bits rather than to 8.
    assert 1e-4 < float(error.max()) < 1e-2


def test_zero_rows_tiny_rows_and_rows_that_are_not_finite():
    weight, x = random_case(40, 200, 9)
    clean = linear_w8a8(x, weight)
    x[1] = 0
    x[2] = 1e-35
    x[4, 150] = float("nan")
    x[6, 0] = float("inf")
    out = linear_w8a8(x, weight)
    assert torch.equal(out[1:3], torch.zeros(2, 40))
    assert bool(out[[4, 6]].isnan().all())
    kept = [0, 3, 5, 7, 8]
    assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize("seed", range(4))
def test_a_row_does_not_depend_on_its_company_or_the_threads(seed):
    weight, x = random_case(150, 389, 230, seed)
    whole = linear_w8a8(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(linear_w8a8(x, weight), whole)
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(seed)
    begin = 0
    while begin < x.shape[0]:
        rows = int(torch.randint(1, 12, (), generator=generator))
        assert torch.equal(linear_w8a8(x[begin : begin + rows], weight), whole[begin : begin + rows])
        begin += rows
    order = torch.randperm(x.shape[0], generator=generator)
    assert torch.equal(linear_w8a8(x[order], weight), whole[order])


def test_weights_are_those_of_weight_only_products():
    weight, _ = random_case(20, 60, 1)
    x = torch.zeros(1, 60)
    x[0, 7] = 32767.0  # a level as it stands: both products are exact
    assert torch.equal(linear_w8a8(x, weight), linear_int8(x, weight))


def test_no_rows_leading_dimensions_and_errors():
    weight, x = random_case(20, 12, 6)
    assert linear_w8a8(x[:0], weight).shape == (0, 20)
    assert torch.equal(linear_w8a8(x.view(2, 3, 12), weight), linear_w8a8(x, weight).view(2, 3, 20))
    with pytest.raises(ConfigError, match=r"torch\.bfloat16 \[6, 12\]"):
        linear_w8a8(x.bfloat16(), weight)
    with pytest.raises(ConfigError, match=r"\[6, 11\], not contiguous.*\[..., 12\]"):
        linear_w8a8(x[:, 1:], weight)
